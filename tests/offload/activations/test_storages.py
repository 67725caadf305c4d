"""What is saved is what was there when it was saved, whoever writes to the same storage, and under whatever counter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.activations.versions import share_version
from offload.modes import tensor_swap
from tests.offload.helpers.models import same_as_resident
from tests.offload.helpers.swapping import Swap, save, swapping


class Recurrent(nn.Module):
    """A cell over five steps of time. On the CPU its gates are chunks of one storage with counters of their own."""

    def __init__(self, cell: type[nn.Module]):
        super().__init__()
        self.cell = cell(8, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        state = None
        for _ in range(5):
            state = self.cell(inputs, state)
            inputs = inputs.roll(1, dims=1)
        return self.head(state[0] if isinstance(state, tuple) else state)


class UnsafeGates(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(8, 32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        reset, update, cell, out = self.gates(inputs).unsafe_chunk(4, dim=1)
        return reset.sigmoid_() * update.sigmoid_() + cell.tanh_() * out.sigmoid_()


@pytest.mark.parametrize("in_flight", [0, 1 << 29])
@pytest.mark.parametrize(
    "model", [lambda: Recurrent(nn.LSTMCell), lambda: Recurrent(nn.GRUCell), lambda: Recurrent(nn.RNNCell), UnsafeGates]
)
def test_gates_that_are_written_one_by_one(model, in_flight: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensor_swap, "IN_FLIGHT_BYTES", in_flight)
    torch.manual_seed(0)
    same_as_resident(model(), swapping())


def test_equal_versions_of_two_counters_are_not_one_state(swap: Swap):
    whole = torch.zeros(4, 12)
    first, second = whole.unsafe_chunk(2, dim=1)
    scalar, seen = save(swap, first.add_(1))
    second.add_(2)
    later, seen_later = save(swap, second)
    del whole, first, second
    (scalar + later).backward()
    assert torch.equal(seen[0][0], torch.ones(4, 6))
    assert torch.equal(seen_later[0][0], torch.full((4, 6), 2.0))


def test_tensors_that_share_a_counter():
    tensor = torch.zeros(4, 4)
    first, second = tensor.unsafe_chunk(2)
    for other, shared in [(tensor[0], True), (tensor.detach(), True), (tensor.data, False), (first, False)]:
        before = (tensor._version, other._version)
        assert share_version(tensor, other) is shared
        assert (tensor._version, other._version) == before
    assert not share_version(first, second)
