"""When windows open and close. What their readers compute is in tests/offload/user_code/test_readers.py."""

from __future__ import annotations

import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.weights.units import OffloadUnit
from tests.offload.helpers.models import Stack, attached, stack_inputs


def units_of(mode) -> list[OffloadUnit]:
    return mode._streamer.cut.units


def open_units(mode) -> list[str]:
    return [unit.name for unit in units_of(mode) if unit.open_windows]


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
    model = nn.Sequential(Reader(lambda when: seen.append((when, open_units(mode)))), nn.Linear(8, 4))
    mode = BounceLinear(slots=3)
    with attached(mode, model), mode.step():
        result = model(stack_inputs(0, 0))
        assert open_units(mode) == []
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
    with attached(mode, model), torch.no_grad():
        before = mode.counters().h2d_bytes
        model(stack_inputs(0, 0))
        copied.append(mode.counters().h2d_bytes - before)
        assert open_units(mode) == []
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
            assert not open_units(mode)
            return self.two(self.one(hidden) @ weight)

    model, mode = Model(), BounceLinear(slots=1)
    with attached(mode, model), mode.step():
        model(stack_inputs(0, 0)).sum().backward()
    assert model.one.weight.grad.abs().sum() > 0


def test_reads_outside_of_forward_give_the_hosts_tensor():
    model, mode = Stack(), LayerStream(outside="stream", slots=2)
    weights = list(model.parameters())
    with attached(mode, model), mode.step():
        before = mode.counters().h2d_bytes
        assert model.stem.weight is weights[0]
        loss = model(stack_inputs(0, 0)).sum()
        assert model.stem.weight is weights[0]
        loss.backward()
        assert model.stem.weight is weights[0]
        assert mode.counters().h2d_bytes > before


def test_an_interrupt_leaves_no_window_open():
    def interrupt(when: str) -> None:
        if when == "after a call":
            raise KeyboardInterrupt

    model, mode = nn.Sequential(Reader(interrupt)), BounceLinear(slots=3)
    with attached(mode, model):
        try:
            with mode.step():
                model(stack_inputs(0, 0))
        except KeyboardInterrupt:
            pass
        assert open_units(mode) == []
        before = mode.counters().h2d_bytes
        model[0].first.weight.sum()
        assert mode.counters().h2d_bytes == before
