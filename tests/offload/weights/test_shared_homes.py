"""Homes that processes share: one memory for all, slots with room for the padding of slices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.sharing.sharers import NO_SHARERS
from offload.weights.shared_homes import make_shared_homes
from offload.weights.units.partition import CutModel, CutPoint, cut
from offload.weights.units.slices import slices_of
from tests.offload.helpers.sharers import ThreadSharers, as_sharers

CPU = torch.device("cpu")


def cut_model() -> CutModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 7))
    return cut(model, [CutPoint(str(index), layer) for index, layer in enumerate(model)])


def test_all_see_one_memory_with_the_weights_and_the_sums_of_their_gradients():
    def work(sharers: ThreadSharers) -> list[torch.Tensor]:
        parts = cut_model()
        arena, slot_bytes = make_shared_homes(parts, sharers, CPU, pin=True)
        assert slot_bytes == max(slices_of(unit, 3).padded_bytes for unit in parts.units)
        for unit in parts.units:
            unit.bring_home(arena, is_shared=True)
            assert all(tensor.gradient is None for tensor in unit.tensors)
        sharers.laid_down(None)
        for unit in parts.units:
            for number, tensor in enumerate(unit.tensors):
                if number % 3 == sharers.rank:
                    tensor.host.data.fill_(number + 1)
                    tensor.shared_gradient.fill_(-number - 1)
        sharers.laid_down(None)
        return [t.clone() for unit in parts.units for u in unit.tensors for t in (u.host.detach(), u.shared_gradient)]

    for found in as_sharers(3, work):
        assert [tensor.unique().tolist() for tensor in found] == [[1], [-1], [2], [-2]] * 2


def test_what_cannot_be_shared_is_refused_before_memory_is_made():
    parts = cut_model()
    weight = parts.units[1].tensors[0]
    weight.host.data = weight.host.data.t().contiguous().t()
    with pytest.raises(ValueError, match=r"^1.weight has strides"):
        make_shared_homes(parts, NO_SHARERS, CPU, pin=True)
