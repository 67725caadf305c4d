"""Messages carry the configuration with its types; waits that a signal interrupts; what a failed exchange means."""

import signal
import threading
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.training.helpers.in_process import composed
from tests.training.parallel.conftest import exchanged
from training.config.schema import Recompute
from training.parallel.messages import Messages, Waiter, decoded, encoded, end_collectives, from_first
from training.parallel.ranks import RankLostError


def test_a_configuration_keeps_values_and_types():
    config, invocation = composed("offload=layer_stream_swap", "recompute=block", "seed=7")
    found, also = decoded(encoded((config, invocation))[1])
    assert also == invocation
    assert OmegaConf.to_yaml(found, resolve=True) == OmegaConf.to_yaml(config, resolve=True)
    for key in ("offload", "offload.weights", "optimizer", "recompute"):
        assert OmegaConf.get_type(OmegaConf.select(found, key)) is OmegaConf.get_type(OmegaConf.select(config, key))
    assert OmegaConf.get_type(found.recompute) is Recompute


class Alone(Messages):
    """The messages of a group of which only this process is there."""

    def __init__(self):
        self.rank, self.count, self.timeout_s, self.is_exchanging = 0, 2, 5.0, False
        self.first_sharer, self._cause = 0, lambda rank: None
        self.hosts = (0, 0)
        self._nccl_groups = []


def fail(error: Exception) -> None:
    raise error


def test_a_rank_s_own_lack_of_memory_is_not_taken_for_the_end_of_another():
    messages = Alone()
    with pytest.raises(torch.OutOfMemoryError):
        messages.attempt(lambda: fail(torch.OutOfMemoryError("Tried to allocate 2 GiB")))
    assert messages.is_exchanging


def test_a_broken_exchange_is_the_end_of_another_rank():
    messages = Alone()
    with pytest.raises(RankLostError, match=r"^a rank has ended"):
        messages.attempt(lambda: fail(RuntimeError("Connection closed by peer")))
    text = "[/src/gloo/pair.cc:538] Connection closed by peer [::1]:123. It is no fault of\n this process. See there."
    with pytest.raises(RankLostError, match=r"^rank 1 has ended: its messages have more .Connection .*\[::1\]:123\)$"):
        raise messages._lost(1, RuntimeError(text))
    messages.hosts = (0, 1)
    with pytest.raises(RankLostError, match=r"^rank 1 on host 1 has ended"):
        raise messages._lost(1, RuntimeError(text))
    messages.count, messages.hosts = 3, (0, 0, 0)
    with pytest.raises(RankLostError, match=r"^a rank hangs"):
        messages.attempt(lambda: fail(RuntimeError("Timed out waiting 5000ms")))
    messages.count = 2
    with pytest.raises(
        RankLostError, match=r"^rank 1 hangs in an exchange, which took longer than parallel.timeout_s=5"
    ):
        messages.attempt(lambda: fail(RuntimeError("Timed out waiting 5000ms")))


def test_a_call_that_has_returned_is_kept_by_nobody():
    """The thread could not free a tensor that it held as the process ended: the process aborted."""
    waiter, tensor = Waiter(), torch.ones(1)
    seen = weakref.ref(tensor)
    waiter.wait(partial(tensor.add_, 1))
    del tensor
    assert seen() is None
    waiter.close()


@pytest.mark.parametrize("thread", ["main", "other"])
def test_a_signal_interrupts_the_wait_and_not_the_call(thread: str):
    """A signal that the system delivers on another thread wakes no wait; nor does one that comes as a wait begins."""
    waiter, go, ended = Waiter(), threading.Event(), []

    def call() -> None:
        signalled = threading.main_thread().ident if thread == "main" else threading.get_ident()
        signal.pthread_kill(signalled, signal.SIGINT)
        go.wait(60)
        ended.append(call)

    with pytest.raises(KeyboardInterrupt):
        waiter.wait(call)
    assert not ended
    go.set()
    waiter.close()


def sharing(rank: int) -> tuple[str, str, float]:
    return from_first(("cpu", "off", 7.5) if rank == 0 else None)


def test_every_rank_gets_that_of_rank_0(tmp_path: Path):
    first, second = exchanged(sharing, tmp_path, 2)
    assert first == second == ("cpu", "off", 7.5)


def test_all_groups_are_ended_also_where_one_has_ended_by_itself():
    ended = []

    class Queued:
        def __init__(self, name: str):
            self.name = name

        def abort(self) -> None:
            ended.append(self.name)
            if self.name == "first":
                raise RuntimeError("NCCL communicator was aborted")

    end_collectives([Queued("first"), Queued("second")])
    assert ended == ["first", "second"]
