"""The device of a rank, and its part of the cores."""

from __future__ import annotations

import pytest
import torch

from tests.training.helpers.in_process import composed
from training.config.validation import check
from training.errors import UserError
from training.parallel import devices
from training.parallel.devices import Seat, device_of, share_cores, take_seat
from training.parallel.world import World


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_ranks_on_the_cpu_share_it():
    assert device_of("cpu", 3, 2) == torch.device("cpu")


def test_each_rank_has_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch):
    chosen = []
    monkeypatch.setattr(devices, "resolve_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert device_of("auto", 2, 1) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    with pytest.raises(UserError, match=r"^devices=3: torch finds 2"):
        device_of("auto", 3, 1)


def test_ranks_of_several_hosts_have_the_gpus_and_cores_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "resolve_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(devices, "usable_cores", lambda: 16)
    # Rank 3 of 4, the second of the second host.
    world = World(3, 4, local_rank=1, local_size=2, host=1, hosts=2)
    assert take_seat("auto", "off", world) == Seat(torch.device("cuda", 1), 8)
    # Of the GPU's node it has three cores; of more than its part of all it takes none.
    monkeypatch.setattr(devices, "gpu_nodes", lambda count: [0, 1][:count])
    for bound, cores in ((3, 3), (12, 8), (None, 8)):
        monkeypatch.setattr(devices, "bind_to_node", lambda nodes, rank, bound=bound: bound)
        assert take_seat("auto", "auto", world).cores == cores
    assert take_seat("auto", "off", world).cores == 8


def test_ranks_on_the_cpu_are_not_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "bind_to_node", lambda nodes, rank: pytest.fail("it was bound"))
    assert take_seat("cpu", "auto", World.of_first(2)).device == torch.device("cpu")


def test_a_gpu_by_number_is_refused_for_several():
    with pytest.raises(UserError, match=r"^device=cuda:1 with devices=2"):
        check(composed("device=cuda:1", "devices=2")[0])


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ("devices=9", "devices=9: must be at most batch_size=8"),
        ("microbatches=3", "microbatches=3: .* between 1 and 2"),
    ],
)
def test_each_rank_needs_a_sequence_for_each_microbatch(given: str, refused: str):
    with pytest.raises(UserError, match=refused):
        check(composed("batch_size=8", "devices=4", given)[0])


def test_threads_are_shared():
    before = torch.get_num_threads()
    assert (share_cores(10_000), torch.get_num_threads()) == (10_000, before)
    assert (share_cores(0), torch.get_num_threads()) == (1, 1)
