"""States that live on the device give the numbers of states that live on the host."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.formats import StateFormat
from offload.streams.stream_checker import CheckedEvent
from tests.offload.helpers.kernels import FEW
from tests.offload.helpers.models import Stack, assert_same, under
from tests.offload.helpers.updates import EARLY, MODES, Mixed, host_adamw, made, one_step, train, updating

pytestmark = pytest.mark.usefixtures("small")

# One byte less than the float32 states of three blocks of a Stack: two blocks fit.
BLOCK = sum(4 + 12 * p.numel() for p in Stack().blocks[0].parameters())
SHARE = 3 * BLOCK - 1


@EARLY
@pytest.mark.parametrize("share", [SHARE, 10**9], ids=["some", "all"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_equals_resident(mode: str, share: int, early: bool):
    """Updates that wait for the step are clipped. In bf16 every parameter has a master, in either place."""
    options = {"microbatches": 2, "steps": 8, "clip_norm": None if early else 0.05}
    seen = train(made(Stack, torch.bfloat16), MODES[mode](), early, device_share=share, **options)
    assert_same(seen, train(made(Stack, torch.bfloat16), Resident(), overlaps=False, **options))


@EARLY
@pytest.mark.parametrize("format", FEW, ids=str)
@pytest.mark.slow
def test_every_format_has_the_same_numbers_in_either_place(format: StateFormat, early: bool):
    """Noise too. The first block is updated on the device, the others on the host."""
    first = HostAdamW.planned_bytes(made(Stack, torch.bfloat16).blocks[0].parameters(), format, placed=True)
    options = {"steps": 4, **vars(format)}
    mode = LayerStream(slots=2, outside="stream")
    seen = train(made(Stack, torch.bfloat16), mode, early, device_share=2 * first - 1, **options)
    assert_same(seen, train(made(Stack, torch.bfloat16), Resident(), overlaps=False, **options))


@EARLY
def test_the_host_updates_nothing_whose_states_are_on_the_device(early: bool):
    model, mode = made(Stack), LayerStream(outside="stream")
    with updating(mode, model, early, device_share=10**9) as (attached, optimizer):
        for step in range(3):
            one_step(model, attached, step, microbatches=2)
            optimizer.step()
            optimizer.zero_grad()
        assert attached.counters().updated_parameters == 0
        # Gradients are freed with their updates, without waiting for the next step.
        assert not attached._overlap._device._gradients


@EARLY
def test_equals_resident_with_frozen_tied_and_skipped_parameters(early: bool):
    mode = LayerStream(slots=2, outside="stream")
    seen = train(made(Mixed, torch.bfloat16), mode, early, device_share=SHARE)
    assert_same(seen, train(made(Mixed, torch.bfloat16), Resident(), overlaps=False))


def test_the_first_units_that_fit_are_chosen_and_only_their_states_move():
    model, mode = made(Stack), LayerStream()
    with updating(mode, model, early=False, device_share=SHARE) as (_, optimizer):
        optimizer.allocate()
        copies = [name for name, p in model.named_parameters() if "weight" in optimizer.state[p]]
    assert copies == [f"blocks.{index}.{name}" for index in (0, 1) for name, _ in model.blocks[0].named_parameters()]


def test_the_host_begins_before_the_devices_updates_are_queued(monkeypatch: pytest.MonkeyPatch):
    """To queue them takes the host's time, and its updates take the longest."""
    model, mode, offered = made(Stack), LayerStream(), []

    def noted(name: str, offer: Callable[..., None]) -> Callable[..., None]:
        return lambda *of, **also: offered.append(name) or offer(*of, **also)

    with updating(mode, model, early=False, device_share=SHARE) as (attached, optimizer):
        for name in ("_worker", "_device"):
            updates = getattr(attached._overlap, name)
            monkeypatch.setattr(updates, "offer", noted(name, updates.offer))
        one_step(model, attached)
        optimizer.step()
        optimizer.finish()
    assert offered == sorted(offered, reverse=True)
    assert set(offered) == {"_worker", "_device"}


def test_a_forward_waits_for_the_update_of_what_it_uses_and_for_no_later_one():
    """Compute stood still until all updates of the device were done, to free the gradients that these read."""
    model, mode, seen = made(Stack), LayerStream(slots=2), []
    with updating(mode, model, early=False, device_share=10**9) as (attached, optimizer):
        streams = attached._streamer.transfer.streams

        def see(*_: object) -> None:
            seen.append(streams.compute.clock.get("d2h", 0))

        one_step(model, attached)
        optimizer.step()
        last = streams.d2h.clock["d2h"]
        for block in model.blocks:
            block.register_forward_hook(see)
        one_step(model, attached, step=1)
        assert not attached._overlap._device._used
    assert seen == sorted(seen)
    assert seen[0] < seen[1] < last


def test_a_copy_in_inside_backward_does_not_wait_for_early_updates(monkeypatch: pytest.MonkeyPatch):
    """Their gradients are limited by themselves; each copy in of a recompute would have stopped compute for them."""
    model, mode, freed = made(Stack), LayerStream(slots=2), []
    with updating(mode, model, early=True, device_share=10**9) as (attached, optimizer):
        device = attached._overlap._device
        for step in range(2):
            one_step(model, attached, step)
            optimizer.step()
            optimizer.zero_grad()
        free = device._free
        monkeypatch.setattr(device, "_free", lambda gradients: freed.append(device._in_step) or free(gradients))
        one_step(model, attached, step=2)
    assert freed.count(True) == 1


def test_gradients_that_are_not_used_do_not_reach_the_next_step():
    """A step is skipped, then the caller sets gradients."""
    expected, model, mode = made(Stack), made(Stack), LayerStream()
    with updating(mode, model, early=False, device_share=10**9) as (attached, optimizer):
        one_step(model, attached)
        optimizer.skip()
        optimizer.zero_grad()
        assert_same([p.detach().clone() for p in model.parameters()], [p.detach() for p in expected.parameters()])
        one_step(model, attached, step=1)
        optimizer.step()
        optimizer.finish()
        optimizer.zero_grad()
        with attached.step():
            pass
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.finish()
        seen = [p.detach().clone() for p in model.parameters()]
    plain, resident = host_adamw(expected), Resident()
    with under(resident, expected) as attached:
        one_step(expected, attached, step=1)
        plain.step()
        for parameter in expected.parameters():
            parameter.grad = torch.ones_like(parameter)
        plain.step()
    assert_same(seen, [p.detach() for p in expected.parameters()])


@EARLY
@pytest.mark.parametrize("who", ["a hook", "a hook that looks", "the caller", "the caller's own"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_a_gradient_that_changes_after_it_landed_is_updated_as_it_is_then(mode: str, who: str, early: bool):
    def flip(parameter: nn.Parameter) -> None:
        parameter.grad.neg_()

    def run(mode, model: nn.Module, overlaps: bool = True) -> list[torch.Tensor]:
        # One block only: the others are updated on the device.
        changed = list(model.blocks[1].parameters())
        for parameter in changed:
            if who.startswith("a hook"):
                hook = flip if who == "a hook" else lambda p: seen.append(p.grad.sum())
                parameter.register_post_accumulate_grad_hook(hook)
        with under(mode, model) as attached:
            optimizer = host_adamw(model)
            if overlaps:
                attached.overlap(optimizer, early and who.startswith("a hook"), device_share=10**9)
            for step in range(4):
                one_step(model, attached, step)
                if who == "the caller":
                    nn.utils.clip_grad_value_(changed, 1e-3)
                elif who == "the caller's own":
                    for parameter in changed:
                        parameter.grad = torch.ones_like(parameter.grad)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.finish()
            return [p.detach().clone() for p in model.parameters()]

    seen = []
    expected = run(Resident(), made(Stack, torch.bfloat16), overlaps=False)
    assert_same(run(MODES[mode](), made(Stack, torch.bfloat16)), expected)


def test_existing_states_move_between_steps():
    def run(moves: bool) -> list[torch.Tensor]:
        model, mode = made(Stack), LayerStream()
        with updating(mode, model, early=False) as (attached, optimizer):
            for step, share in enumerate((0, SHARE, 10**9, 0)):
                if moves:
                    attached.place_states(share)
                one_step(model, attached, step)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.finish()
            return [p.detach().clone() for p in model.parameters()]

    assert_same(run(moves=True), run(moves=False))


@EARLY
def test_a_weight_that_begins_to_train_later_is_updated_on_the_host(early: bool):
    """Its state is not among those that were placed, though all of its unit's others are."""

    def trained(mode, share: int = 0) -> list[torch.Tensor]:
        model = made(Stack)
        late = model.blocks[1].up.weight.requires_grad_(False)

        def train_it_too(*_: object) -> list[torch.Tensor]:
            late.requires_grad_(True)
            return []

        seen = train(model, mode, early, steps=4, device_share=share, after_step=train_it_too)
        # Losses and weights: on the device float32 states have copies of the weights besides.
        return seen[:4] + seen[-len(model.state_dict()) :]

    assert_same(trained(LayerStream(slots=2), share=10**9), trained(Resident()))


def test_a_second_optimizer_step_waits_for_the_updates_of_the_first(monkeypatch: pytest.MonkeyPatch):
    """It is the optimizer's own, which the host orders: the gradients on the device are used up."""
    model, mode, waited = made(Stack), LayerStream(), []
    with updating(mode, model, early=False, device_share=10**9) as (attached, optimizer):
        one_step(model, attached)
        optimizer.step()
        under_way = list(attached._overlap._device._updated.values())
        with monkeypatch.context() as patch:
            synchronize = CheckedEvent.synchronize
            patch.setattr(CheckedEvent, "synchronize", lambda event: (waited.append(event), synchronize(event)))
            optimizer.step()
    assert under_way
    assert waited[: len(under_way)] == under_way


def half_by_numpy(parameter: torch.Tensor) -> None:
    parameter.detach().numpy()[:] *= 0.5


def half_by_data(parameter: torch.Tensor) -> None:
    parameter.data.mul_(0.5)


def half_by_other_data(parameter: torch.Tensor) -> None:
    parameter.data = parameter.data * 0.5


@pytest.mark.parametrize("half", [half_by_data, half_by_numpy, half_by_other_data])
@pytest.mark.parametrize("what", ["weight after the step", "weight before it", "gradient"])
def test_writes_without_a_version_counter_count(what: str, half: Callable[[torch.Tensor], None]):
    """Such as weights that are clamped by `.data`, and gradients by a GradScaler's `unscale_`."""

    def run(mode, overlaps: bool = True) -> list[torch.Tensor]:
        model = made(Stack)
        written = [*model.blocks[1].parameters()]
        with under(mode, model) as attached:
            optimizer = host_adamw(model)
            if overlaps:
                attached.overlap(optimizer, early=False, device_share=10**9)
            for step in range(3):
                one_step(model, attached, step)
                for parameter in written if what != "weight after the step" else ():
                    half(parameter.grad if what == "gradient" else parameter)
                optimizer.step()
                optimizer.finish()
                optimizer.zero_grad()
                for parameter in written if what == "weight after the step" else ():
                    half(parameter)
            return [p.detach().clone() for p in model.parameters()]

    assert_same(run(LayerStream(outside="stream")), run(Resident(), overlaps=False))
