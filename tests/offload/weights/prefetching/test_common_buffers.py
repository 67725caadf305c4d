"""Buffers that models of two modes have in common."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.modes.layer_stream import LayerStream
from tests.offload.helpers.models import attached


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.linear(rows)


@pytest.mark.parametrize("second", ["after", "inside"])
def test_models_with_a_buffer_in_common_take_their_steps_one_after_the_other(second: str):
    one, other = (nn.Sequential(nn.ModuleList([Counting(), Counting()])) for _ in range(2))
    one.forward, other.forward = (lambda rows, blocks=model[0]: blocks[1](blocks[0](rows)) for model in (one, other))
    other[0][0].calls = calls = one[0][0].calls
    modes = LayerStream(slots=2), LayerStream(slots=2)

    def run(mode, model) -> None:
        model(torch.ones(2, 4)).sum().backward()

    with attached(modes[0], one), attached(modes[1], other):
        if second == "after":
            for _ in range(3):
                for mode, model in zip(modes, (one, other), strict=True):
                    with mode.step():
                        run(mode, model)
            assert calls.tolist() == [6.0] * 4
        else:
            refused = pytest.raises(RuntimeError, match="a model of another step that is open has too")
            with refused, modes[0].step(), modes[1].step():
                run(modes[0], one)
            with modes[1].step():
                run(modes[1], other)
