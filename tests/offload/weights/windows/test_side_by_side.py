"""Parameters that change between two looks are named; what replaced them goes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.torch_private.running_microbatch import SideBySideError
from offload.weights.units.partition import CutModel, CutPoint, cut
from offload.weights.windows.side_by_side import WeightsSideBySide
from tests.offload.helpers.quantised import Nested


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.fixture
def parts(model: nn.Module) -> CutModel:
    return cut(model, [CutPoint("0", model[0])])


CHANGES = {
    "frozen": (lambda layer: layer.weight.requires_grad_(False), "was frozen or unfrozen"),
    "in place": (lambda layer: layer.weight.zero_(), "was changed"),
    "other data": (lambda layer: setattr(layer.weight, "data", torch.zeros(2, 2)), "was changed"),
}


@pytest.mark.parametrize(("layer", "name"), [(0, "0.weight"), (1, "weight of a Linear")])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named(model: nn.Module, parts: CutModel, layer: int, name: str, change: str):
    weights = WeightsSideBySide(parts, lambda unit: False)
    weights.check()
    make, problem = CHANGES[change]
    with torch.no_grad():
        make(model[layer])
    with pytest.raises(SideBySideError, match=f"^{name} {problem} in a loss") as refused:
        weights.check()
    assert "\n" not in str(refused.value)


PART_CHANGES = {
    "written": lambda weight: weight.scale.mul_(2),
    "replaced": lambda weight: setattr(weight, "scale", weight.scale * 2),
}


@pytest.mark.parametrize(("layer", "name"), [(0, "0.weight"), (1, "weight of a Linear")])
@pytest.mark.parametrize("change", PART_CHANGES)
def test_a_change_of_a_part_is_named(model: nn.Module, layer: int, name: str, change: str):
    """Such as the scales of a quantised weight, which has no version counter of theirs."""
    for each in model:
        each.weight = nn.Parameter(Nested.of(each.weight.detach()), requires_grad=False)
    weights = WeightsSideBySide(cut(model, [CutPoint("0", model[0])]), lambda unit: False)
    weights.check()
    with torch.no_grad():
        PART_CHANGES[change](model[layer].weight)
    with pytest.raises(SideBySideError, match=f"^{name} was changed in a loss"):
        weights.check()


def test_an_update_that_is_under_way_is_no_change(model: nn.Module, parts: CutModel):
    weights = WeightsSideBySide(parts, lambda unit: True)
    with torch.no_grad():
        model[0].weight.zero_()
    weights.check()
    parts.units[0].tensors[0].writes += 1
    with pytest.raises(SideBySideError):
        weights.check()


def test_replacements_go(model: nn.Module, parts: CutModel):
    weights, found = WeightsSideBySide(parts, lambda unit: False), list(model.parameters())
    for layer in model:
        layer._parameters["weight"] = torch.zeros(2, 2)
    weights.put_back()
    assert all(one is other for one, other in zip(model.parameters(), found, strict=True))
