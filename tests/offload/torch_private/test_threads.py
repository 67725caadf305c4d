"""Each thread knows which microbatch it runs, and a second thread's forward is refused while one runs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.tensor_swap import TensorSwap
from offload.torch_private.threads import OneThread, running, running_microbatch
from tests.offload.helpers.models import Stack, stack_inputs, under


def test_a_microbatch_runs_in_its_thread_until_the_block_ends():
    seen = []
    assert running_microbatch() is None
    with running(3):
        assert running_microbatch() == 3
        thread = threading.Thread(target=lambda: seen.append(running_microbatch()))
        thread.start()
        thread.join(300)
        with running(4):
            assert running_microbatch() == 4
        assert running_microbatch() == 3
    assert running_microbatch() is None
    assert seen == [None]


def test_threads_take_turns_or_are_refused():
    one, inside, leave = OneThread(), threading.Event(), threading.Event()

    def stay() -> None:
        with one.turn():
            inside.set()
            leave.wait(300)

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(stay)
        inside.wait(300)
        with pytest.raises(RuntimeError, match=r"^two threads run forwards of one model") as refused, one.turn():
            pass
        assert "\n" not in str(refused.value)
        with running(0), one.turn():
            """Microbatches side by side take turns by themselves."""
        leave.set()
        busy.result(300)
    with pytest.raises(ZeroDivisionError), one.turn():
        raise ZeroDivisionError
    with one.turn():
        """Free again."""


@pytest.mark.parametrize("make", [LayerStream, lambda: TensorSwap(Resident())])
def test_a_mode_refuses_a_forward_in_another_thread_during_one(make):
    model, mode, errors = Stack(), make(), []

    def in_another_thread(*_: object) -> None:
        with ThreadPoolExecutor(1) as pool:
            errors.append(pool.submit(model, stack_inputs(0, 1)).exception())

    with under(mode, model) as attached, attached.step():
        handle = model.blocks[1].register_forward_hook(in_another_thread)
        model(stack_inputs(0, 0))
        handle.remove()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model, stack_inputs(0, 0)).result(300).sum().backward()
    assert "two threads" in str(errors[0])
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
