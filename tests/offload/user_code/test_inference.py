"""Forwards in a row inside `attached.inference()`: the resident model's numbers, each unit copied once a forward."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.optimizer.adamw import HostAdamW
from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.user_code import (
    EVERY_MODE,
    EVERY_MODE_OR_NONE,
    alike,
    as_resident,
    descend,
    evaluate,
    train_step,
    under,
)

pytestmark = pytest.mark.usefixtures("device")


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(count), device="cpu").to(
        torch.get_default_device()
    )


def forwards(model: nn.Module, attached, *counts: int) -> list[torch.Tensor]:
    with attached.inference():
        return [model(rows(count)) for count in counts]


@EVERY_MODE_OR_NONE
@as_resident()
def test_forwards_of_other_shapes_between_steps(model: nn.Module, mode) -> list[torch.Tensor]:
    seen = forwards(model, mode, 5, 5, 1, 300, 5)
    for step in range(3):
        seen += [train_step(model, mode, step), *forwards(model, mode, 5, 2), evaluate(model)]
    return [*seen, *forwards(model, mode, 1)]


@EVERY_MODE
@as_resident()
def test_inside_a_step_with_a_backward_after_it(model: nn.Module, attached) -> list[torch.Tensor]:
    """As a rollout before the update by it."""
    seen = []
    for step in range(3):
        with attached.step():
            seen += forwards(model, attached, 5, *[1] * (4 - step))
            loss = model(stack_inputs(step, 0)).square().mean()
            loss.backward()
            seen.append(loss.detach())
        descend(model)
    return seen


@EVERY_MODE
@as_resident()
def test_parts_of_the_model_in_any_order(model: nn.Module, attached) -> list[torch.Tensor]:
    seen = []
    with attached.inference():
        for order in ((0, 1, 2, 3), (0, 1, 2, 3), (3, 1), (2, 0, 3, 1), (2, 2), (0, 1, 2, 3)):
            hidden = model.stem(rows(5))
            for index in order:
                hidden = model.blocks[index](hidden)
            seen.append(model.head(hidden))
    return seen


class Remembering(Stack):
    """Attends to what it has seen in earlier forwards, and counts these in a buffer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.cache: list[torch.Tensor] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        self.cache.append(hidden)
        past = torch.cat(self.cache)
        return self.head(self.norm(hidden) + (hidden @ past.T).softmax(-1) @ past)


@EVERY_MODE
@pytest.mark.parametrize("training", [False, True])
@as_resident(Remembering)
def test_a_cache_and_running_statistics(model: nn.Module, mode, training: bool) -> list[torch.Tensor]:
    model.train(training)
    seen = forwards(model, mode, 4, 2, 2, 2)
    model.cache.clear()
    seen += forwards(model, mode, 3, 2)
    model.cache.clear()
    return [*seen, model.norm.running_var.clone(), model.norm.num_batches_tracked.clone()]


@EVERY_MODE
@as_resident()
def test_weights_changed_between_two_of_them(model: nn.Module, mode) -> list[torch.Tensor]:
    seen = forwards(model, mode, 5, 5)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    seen += forwards(model, mode, 5, 5)
    model.blocks[1].up.weight = nn.Parameter(model.blocks[1].up.weight.detach() * 0.5)
    model.head.weight.data = model.head.weight.data * 2
    return [*seen, *forwards(model, mode, 5, 5), train_step(model, mode)]


@EVERY_MODE
@pytest.mark.parametrize("again", [True, False])
def test_a_broken_promise_is_refused_where_the_version_shows_it(make: Callable, again: bool):
    # In the next forward, or at the end. A copy may have been reading the weights, so no result can be trusted.
    model, mode = Stack(), make()

    def broken() -> None:
        with attached.inference():
            model(rows(5))
            model.blocks[1].up.weight.mul_(1.1)
            if again:
                model(rows(5))
                pytest.fail("the second forward went on")

    with under(mode, model) as attached:
        with pytest.raises(RuntimeError, match=r"a parameter of .* was changed inside attached\.inference\(\)"):
            broken()
        assert torch.isfinite(train_step(model, attached))


@EVERY_MODE
@as_resident()
def test_an_error_inside_leaves_the_next_forwards_right(model: nn.Module, mode) -> list[torch.Tensor]:
    hook = model.blocks[2].up.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forwards(model, mode, 5, 5)
    hook.remove()
    return [*forwards(model, mode, 5, 5), train_step(model, mode)]


STREAMING = {
    "bounce_linear": lambda slots: BounceLinear(slots=slots, outside="stream"),
    "layer_stream": lambda slots: LayerStream(slots=slots, outside="stream"),
    "shard_offload": lambda slots: ShardOffload(slots=slots, shards=4),
}


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("name", STREAMING)
def test_a_unit_is_copied_once_a_forward_at_most(name: str, slots: int):
    model, mode, count = Stack(depth=8), STREAMING[name](slots), 6
    unit_bytes, largest = mode.footprint(model).host_weight_bytes, mode.footprint(model).largest_unit_bytes
    with under(mode, model) as attached:
        for around in (attached.inference, attached.step):
            before = attached.counters().h2d_bytes
            with around(), torch.no_grad():
                for number in range(count):
                    model(rows(1 + number))
            moved = attached.counters().h2d_bytes - before
            # What came in for a forward that was not made is in the slots.
            assert moved <= count * unit_bytes + slots * largest
            assert moved >= count * (unit_bytes - slots * largest)


@pytest.mark.parametrize("name", STREAMING)
def test_the_next_forward_begins_with_its_first_units_on_the_device(name: str):
    model, mode = Stack(depth=8), STREAMING[name](3)
    with under(mode, model) as attached:
        first, second = attached._streamer.cut.units[:2]
        for _ in range(2):
            with attached.inference():
                for number in range(4):
                    if number > 1:
                        assert {first, second} <= {slot.content for slot in attached._streamer._slots}
                    model(rows(5))
            # The host may change weights now.
            assert not [slot for slot in attached._streamer._slots if slot.content is not None]


def test_units_that_fit_into_the_slots_are_copied_once_for_all_forwards():
    model, mode = Stack(), LayerStream(slots=9, outside="stream")
    with under(mode, model) as attached:
        forwards(model, attached, 5, 1, 5, 5)
        assert attached.counters().h2d_bytes == mode.footprint(model).host_weight_bytes


@EVERY_MODE_OR_NONE
def test_gradients_are_off_inside_and_inside_itself_and_on_afterwards(make: Callable):
    model, mode = Stack(), make()
    with under(mode, model) as attached:
        with attached.inference(), attached.inference():
            assert not torch.is_grad_enabled()
            assert not model(rows(2)).requires_grad
            model(rows(2))
        assert torch.is_grad_enabled()
        train_step(model, attached)


@pytest.mark.parametrize("name", STREAMING)
def test_what_changes_weights_or_takes_them_away_is_refused_inside(name: str):
    model, mode = Stack(), STREAMING[name](3)
    with under(mode, model) as attached:
        optimizer = HostAdamW(model.parameters(), lr=1e-3, threads=1)
        attached.overlap(optimizer, early=False)
        with attached.step():
            model(rows(5)).square().mean().backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with attached.inference():
            with pytest.raises(RuntimeError, match=r"a step inside attached\.inference\(\)"), attached.step():
                pass
            with pytest.raises(RuntimeError, match=r"detach inside attached\.inference\(\)"):
                attached.detach()
            with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) inside attached\.inference\(\)"):
                optimizer.step()
            model(rows(5))
        assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
        optimizer.step()
        optimizer.finish()
        assert not torch.equal(before[0], next(model.parameters()))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", STREAMING)
def test_updates_that_are_under_way_come_before_their_units(name: str, early: bool):
    def run(make: Callable) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, mode, seen = Stack(), make(), []
        with under(mode, model) as attached:
            optimizer = HostAdamW(model.parameters(), lr=0.1, threads=1)
            attached.overlap(optimizer, early)
            for step in range(3):
                with attached.step():
                    attached.accumulate([lambda step=step: model(stack_inputs(step, 0)).square().mean()])
                optimizer.step()
                seen += forwards(model, attached, 5, 2, 5)
                optimizer.zero_grad()
            return seen

    for one, other in zip(run(lambda: STREAMING[name](3)), run(Resident), strict=True):
        # On a GPU the resident model's updates are made there.
        assert alike(one, other)
