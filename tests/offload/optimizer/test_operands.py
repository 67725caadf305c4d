"""Operands in pieces: every tensor is cut at the same elements, scales at their blocks."""

from __future__ import annotations

import pytest
import torch

from offload.optimizer.formats import StateFormat
from tests.offload.helpers.kernels import FEW, from_place, operands, tensors


@pytest.mark.parametrize("format", FEW, ids=str)
@pytest.mark.parametrize(("size", "pieces"), [(100, None), (300, None), (5000, 1)])
def test_pieces_are_views_that_cover_the_whole_once(format: StateFormat, size: int, pieces: int | None):
    whole = from_place(operands(1000, format), 7)
    for tensor in tensors(whole):
        tensor.zero_()
    parts = list(whole.split(size))
    assert pieces is None or len(parts) == pieces
    for part in parts:
        for tensor in tensors(part):
            tensor += 1
    assert all((tensor == 1).all() for tensor in tensors(whole))
    assert torch.equal(torch.cat([part.gradient for part in parts]), whole.gradient)
    starts = [7]
    for part in parts[:-1]:
        starts.append(starts[-1] + part.weight.numel())
    assert [part.start for part in parts] == starts
    assert {part.seed for part in parts} == {whole.seed}


def test_pieces_of_codes_are_whole_blocks():
    parts = list(operands(1000, StateFormat("compact", "int8")).split(700))
    assert [part.weight.numel() for part in parts] == [512, 488]
    assert [part.exp_avg_scale.numel() for part in parts] == [2, 2]
