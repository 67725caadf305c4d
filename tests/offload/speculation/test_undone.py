"""Failures, skips and looks between backward and the step find the state before the step."""

import functools
import math
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.modes.layer_stream import LayerStream
from offload.optimizer.adamw import HostAdamW
from offload.speculation.trials import Speculation
from offload.speculation.updates import SpeculativeOverlap
from tests.offload.helpers.kernels import needs_compiler
from tests.offload.helpers.models import Stack, assert_same, stack_inputs
from tests.offload.helpers.updates import made, one_step, states_of, updating

pytestmark = [pytest.mark.usefixtures("small"), needs_compiler]

PLENTY = 1 << 24


class StepError(Exception):
    pass


def failing_once(model: nn.Module, when: list[int], first=lambda: None) -> None:
    """Makes backward of the first block fail in the steps whose counts are in `when`."""
    calls = iter(range(1000))

    def fail(module, grad_input, grad_output):
        if next(calls) in when:
            first()
            raise StepError

    model.blocks[0].register_full_backward_hook(fail)


@pytest.mark.parametrize("speculates", [False, True])
def test_after_an_exception_the_optimizer_is_as_before_the_step(speculates: bool):
    """Late in backward, when most updates have been made."""
    model, mode = made(Stack), LayerStream(slots=2)
    speculation, made_before = Speculation(1e9, PLENTY) if speculates else None, [0]

    def wait_for_the_worker() -> None:
        deadline = time.monotonic() + 300
        while (
            speculates and attached.counters().speculated_parameters == made_before[0] and time.monotonic() < deadline
        ):
            time.sleep(0.001)

    failing_once(model, [3], wait_for_the_worker)
    with updating(mode, model, early=False, speculation=speculation) as (attached, optimizer):
        for step in range(3):
            one_step(model, attached, step)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
        before = [tensor.clone() for tensor in (*model.parameters(), *states_of(optimizer))]
        made_before[0] = attached.counters().speculated_parameters
        with pytest.raises(StepError):
            one_step(model, attached, 3)
        if speculates:
            assert attached.counters().undone_parameters
        # Without waiting for anything.
        states = optimizer.state
        assert_same([tensor.detach() for tensor in (*model.parameters(), *in_order(optimizer))], before)
        assert not optimizer.has_begun
        optimizer.zero_grad()
        one_step(model, attached, 4)
        optimizer.step()
        optimizer.finish()
        assert all(state["step"] == 4 for state in states.values())


def in_order(optimizer: HostAdamW) -> list[torch.Tensor]:
    """The tensors of all states, in the order of `states_of`, without waiting for updates."""
    states = (optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"])
    return [state[name] for state in states for name in sorted(state)]


READERS = {
    "optimizer.state_dict()": lambda model, optimizer: optimizer.state_dict(),
    "model.state_dict()": lambda model, optimizer: model.state_dict(),
    "optimizer.finish()": lambda model, optimizer: optimizer.finish(),
    "an evaluation": lambda model, optimizer: model(stack_inputs(0, 0)),
}


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("reader", READERS)
def test_who_looks_between_backward_and_step_sees_the_state_before_the_step(reader: str):
    model, theirs = made(Stack), made(Stack)
    mode, speculation = LayerStream(slots=2), Speculation(1e9, PLENTY)
    with (
        updating(mode, model, early=False, speculation=speculation, speculate="on") as (attached, optimizer),
        updating(mode, theirs, early=False) as (other, reference),
    ):
        for step in range(5):
            for each, of in ((model, attached), (theirs, other)):
                one_step(each, of, step)
            seen = []
            for each, by in ((model, optimizer), (theirs, reference)):
                with torch.no_grad():
                    found = READERS[reader](each, by)
                shown = [found] if torch.is_tensor(found) else list(each.parameters())
                seen.append([tensor.detach().clone() for tensor in (*shown, *in_order(by))])
                by.step()
                by.zero_grad()
            assert_same(*seen)
        for by in (optimizer, reference):
            by.finish()
        assert_same(list(model.parameters()), list(theirs.parameters()))
        assert attached.counters().undone_parameters


Steps = Callable[[Stack, LayerStream, HostAdamW], None]


def same_as_deferred(
    steps: Steps, limit: float = math.inf, make: Callable[[], nn.Module] = Stack, dtype: torch.dtype = torch.float32
) -> int:
    """Fails unless `steps` have the numbers of deferred updates; returns how many parameters were undone."""
    results = []
    for speculation in (None, Speculation(limit, PLENTY)):
        model, mode = made(make, dtype), LayerStream(slots=2)
        with updating(mode, model, early=False, speculation=speculation, speculate="on") as (attached, optimizer):
            steps(model, attached, optimizer)
            results.append([*states_of(optimizer), *(p.detach().clone() for p in model.parameters())])
            undone = attached.counters().undone_parameters
    assert_same(*results)
    return undone


@pytest.mark.usefixtures("in_time")
def test_gradients_are_added_over_steps_and_updates_taken_back():
    def steps(model: Stack, mode: LayerStream, optimizer: HostAdamW) -> None:
        for step in range(6):
            one_step(model, mode, step)
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    assert same_as_deferred(steps, limit=1e9)


@pytest.mark.usefixtures("in_time")
def test_steps_that_are_skipped_are_undone():
    def steps(model: Stack, attached: LayerStream, optimizer: HostAdamW) -> None:
        for step in range(6):
            before = attached.counters().speculated_parameters
            one_step(model, attached, step)
            if step in (2, 3):
                # On a busy machine the worker may not have begun: then there is nothing to undo.
                deadline = time.monotonic() + 30
                while (
                    isinstance(optimizer.deferral, SpeculativeOverlap)
                    and attached.counters().speculated_parameters == before
                    and time.monotonic() < deadline
                ):
                    time.sleep(0.001)
                optimizer.skip()
            else:
                optimizer.step()
            optimizer.zero_grad()

    assert same_as_deferred(steps)


def test_settings_that_change_between_backward_and_step_count():
    def steps(model: Stack, mode: LayerStream, optimizer: HostAdamW) -> None:
        for step in range(4):
            one_step(model, mode, step)
            optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)
            optimizer.step()
            optimizer.zero_grad()

    same_as_deferred(steps)


def test_an_update_without_an_inverse_is_taken_back_at_once():
    """With beta1 of 0 no old moment follows from the new one, so all logs are full."""

    def steps(model: Stack, mode: LayerStream, optimizer: HostAdamW) -> None:
        optimizer.param_groups[0]["betas"] = (0.0, 0.9)
        for step in range(5):
            one_step(model, mode, step)
            optimizer.step()
            optimizer.zero_grad()

    same_as_deferred(steps, make=functools.partial(Stack, width=64))


@pytest.mark.parametrize("how", ["written", "other data"])
@pytest.mark.parametrize("what", ["gradient", "parameter"])
def test_a_change_that_would_be_lost_is_an_error(what: str, how: str):
    model, mode = made(Stack), LayerStream(slots=2)
    with updating(mode, model, early=False, speculation=Speculation(1e9, PLENTY), speculate="on") as (
        attached,
        optimizer,
    ):
        for step in range(8):
            one_step(model, attached, step)
            if step == 7:
                parameter = model.blocks[3].up.weight
                while attached._overlap._worker.is_busy:
                    time.sleep(0.001)
                assert optimizer.state[parameter]["step"] == 8
                changed = parameter.grad if what == "gradient" else parameter
                with torch.no_grad():
                    if how == "written":
                        changed.mul_(2)
                    else:
                        changed.data = changed.data * 2
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"call optimizer.finish\(\) before the change"):
            optimizer.finish()


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("loads", [False, True])
def test_a_first_update_that_is_taken_back_leaves_no_state(loads: bool):
    """A master that it had made would overwrite what is written to the weights then.

    `loads`: the state was loaded from torch's AdamW, which has no masters.
    """

    def steps(model: Stack, mode: LayerStream, optimizer: HostAdamW) -> None:
        for step in range(2):
            one_step(model, mode, step)
            optimizer.finish()
            assert not optimizer.state_dict()["state"]
            optimizer.skip()
            optimizer.zero_grad()
        if loads:
            theirs = torch.optim.AdamW([{"params": group["params"]} for group in optimizer.param_groups])
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1)
            theirs.step()
            theirs.zero_grad()
            optimizer.load_state_dict(theirs.state_dict())
        one_step(model, mode, 2)
        optimizer.finish()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        optimizer.step()

    assert same_as_deferred(steps, dtype=torch.bfloat16)
