"""Windows open and close in time. tests/offload/user_code/test_readers.py has what their readers compute."""

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.optimizer.adamw import HostAdamW
from offload.weights.units.unit import OffloadUnit
from tests.offload.helpers.models import Stack, stack_inputs, under, with_copy


def units_of(attached) -> list[OffloadUnit]:
    return attached._streamer.cut.units


def open_units(attached) -> list[str]:
    return [unit.name for unit in units_of(attached) if unit.open_windows]


class Reader(nn.Module):
    """Calls the function with itself at three points of its forward."""

    def __init__(self, look):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.look = look

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.look("before")
        hidden = hidden @ self.first.weight
        self.look("after the read")
        hidden = self.second(hidden)
        self.look("after a call")
        return hidden


def test_a_window_opens_where_the_reader_is_and_closes_when_its_forward_ends():
    seen: list[tuple[str, list[str]]] = []
    model = nn.Sequential(Reader(lambda when: seen.append((when, open_units(attached)))), nn.Linear(8, 4))
    mode = BounceLinear(slots=3)
    with under(mode, model) as attached, attached.step():
        result = model(stack_inputs(0, 0))
        assert open_units(attached) == []
        result.sum().backward()
    assert seen == [("before", []), ("after the read", ["0.first"]), ("after a call", ["0.first"])]


def test_reads_of_one_weight_take_one_slot_and_one_copy():
    copied = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            weights = [self.inner.weight for _ in range(3)]
            assert all(weight is weights[0] for weight in weights)
            return hidden @ weights[0] @ weights[1]

    model, mode = Model(), BounceLinear(slots=2)
    with under(mode, model) as attached, torch.no_grad():
        before = attached.counters().h2d_bytes
        model(stack_inputs(0, 0))
        copied.append(attached.counters().h2d_bytes - before)
        assert open_units(attached) == []
    assert copied == [units_of_nbytes(model)]


def units_of_nbytes(model: nn.Module) -> int:
    """Bytes of a layer as a unit, each tensor at a multiple of 256."""
    return sum(-(-parameter.nbytes // 256) * 256 for parameter in model.parameters())


def test_without_room_for_a_window_a_reader_gets_a_copy():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            weight = self.one.weight
            assert weight is self.one.weight
            assert isinstance(weight, nn.Parameter)
            assert not open_units(attached)
            return self.two(self.one(hidden) @ weight)

    model, mode = Model(), BounceLinear(slots=1)
    with under(mode, model) as attached, attached.step():
        model(stack_inputs(0, 0)).sum().backward()
    assert model.one.weight.grad.abs().sum() > 0


def test_reads_outside_of_forward_give_the_hosts_tensor():
    model, mode = Stack(), LayerStream(outside="stream", slots=2)
    weights = list(model.parameters())
    with under(mode, model) as attached, attached.step():
        before = attached.counters().h2d_bytes
        assert model.stem.weight is weights[0]
        loss = model(stack_inputs(0, 0)).sum()
        assert model.stem.weight is weights[0]
        loss.backward()
        assert model.stem.weight is weights[0]
        assert attached.counters().h2d_bytes > before


def test_an_interrupt_leaves_no_window_open():
    def interrupt(when: str) -> None:
        if when == "after a call":
            raise KeyboardInterrupt

    model, mode = nn.Sequential(Reader(interrupt)), BounceLinear(slots=3)
    with under(mode, model) as attached:
        try:
            with attached.step():
                model(stack_inputs(0, 0))
        except KeyboardInterrupt:
            pass
        assert open_units(attached) == []
        before = attached.counters().h2d_bytes
        model[0].first.weight.sum()
        assert attached.counters().h2d_bytes == before


def test_after_an_interrupt_a_forward_computes_with_the_weights_of_now():
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model, twin = with_copy(Stack())
    mode = LayerStream(slots=9)
    with under(mode, model) as attached, torch.no_grad():
        hook = model.blocks[2].up.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(stack_inputs(0, 0))
        hook.remove()
        for _ in range(2):
            for parameter in (*model.parameters(), *twin.parameters()):
                parameter.data.mul_(1.5)
            assert not attached._streamer._windows.threads.running.scopes
            found = model(stack_inputs(0, 0))
    assert torch.equal(found, twin(stack_inputs(0, 0)))


@pytest.mark.parametrize("slots", [1, 9])
def test_a_hook_around_a_forward_outside_of_steps_reads_the_weights_of_now(slots: int):
    """Before the forward and after it, with a slot for its window or with a copy."""
    model, mode, seen = Stack(), LayerStream(slots=slots), []
    model.register_forward_pre_hook(lambda *_: seen.append(model.blocks[0].up.weight.sum().item()))
    model.register_forward_hook(lambda *_: seen.append(model.blocks[3].up.weight.sum().item()))
    with under(mode, model) as attached, torch.no_grad():
        for factor in (1.0, 1.5, 2.0):
            for parameter in model.parameters():
                parameter.data.mul_(factor)
            model(stack_inputs(0, 0))
            expected = [model.blocks[index].up.weight.sum().item() for index in (0, 3)]
            assert seen[-2:] == expected
            assert not [slot for slot in attached._streamer._slots if slot.content is not None]


def test_units_stay_in_their_slots_while_a_lone_forward_runs():
    class Twice(Stack):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) + super().forward(inputs)

    for slots, times in ((9, 1), (2, 2)):
        model, mode = Twice(), LayerStream(slots=slots)
        with under(mode, model) as attached, torch.no_grad():
            for count in (1, 2):
                model(stack_inputs(0, 0))
                assert attached.counters().h2d_bytes == count * times * mode.footprint(model).host_weight_bytes


def test_what_a_lone_forward_changes_inside_the_window_of_a_hook_is_kept():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))
            self.seen = []
            self.register_forward_pre_hook(lambda *_: self.seen.append(self.blocks[0][1].running_mean.sum()))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](hidden))

    model, twin = with_copy(Counting())
    mode = LayerStream(slots=2)
    with under(mode, model) as attached, torch.no_grad():
        for step in range(3):
            assert torch.equal(model(stack_inputs(step, 0)), twin(stack_inputs(step, 0)))
            for unit in units_of(attached):
                # Raises StreamOrderError where a copy home may still be under way.
                attached._streamer._streams.reads(None, unit.weights, "the user's look at buffers")
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other)


def test_an_interrupt_in_a_step_whose_updates_have_begun_ends_the_step():
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model, mode = Stack(), LayerStream(slots=2)
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda *_: seen.append(model.blocks[3].up.weight.sum()))
    with under(mode, model) as attached:
        optimizer = HostAdamW(model.parameters(), lr=0.1, threads=1)
        attached.overlap(optimizer, early=True)
        for _ in range(2):
            with attached.step():
                attached.accumulate([lambda: model(stack_inputs(0, 0)).square().mean()])
            optimizer.step()
        model.blocks[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt), attached.step():
            model(stack_inputs(0, 0))
        optimizer.finish()
        assert not open_units(attached)
