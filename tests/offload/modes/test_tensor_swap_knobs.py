"""Knobs of tensor_swap that do not fit are refused in a line, and so is a predicate of the user that goes wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.modes.none import Resident
from offload.modes.save_on_cpu import SaveOnCpu
from tests.offload.helpers.models import Stack, attached, stack_inputs
from tests.offload.helpers.swapping import swapping


def wanted(tensor: torch.Tensor) -> bool:
    return tensor.shape[-1] == 32


def swapped_in_a_step(**knobs) -> float:
    model, mode = Stack(), swapping(**knobs)
    with attached(mode, model):
        with mode.step():
            model(stack_inputs(0, 0)).square().sum().backward()
        return mode.counters().swapped_bytes


def test_a_predicate_by_import_path():
    # The inputs that gelu and down save, once each in four blocks.
    assert swapped_in_a_step(predicate=f"{__name__}.wanted") == 2 * 4 * 5 * 32 * 4


@pytest.mark.parametrize(
    ("predicate", "message"),
    [
        ("os.getcwd", r"predicate=os.getcwd: raised TypeError: .* takes no arguments"),
        ("torch.relu", "predicate=torch.relu: returned a Tensor; return True or False"),
    ],
)
def test_an_error_of_a_predicate_names_it(predicate: str, message: str):
    with pytest.raises(ValueError, match=message):
        swapped_in_a_step(predicate=predicate)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"layers": ["encoder.*"]}, r"layers=encoder.\*: no module has such a name; .* stem, blocks"),
        ({"layers": ["blocks.*", "block"]}, "layers=block: no module has such a name"),
        ({"layers": []}, r"layers=\[\]: names no module"),
        ({"keep_last": 5}, "keep_last=5: must be between 0 and the 4"),
        ({"keep_last": -1}, "keep_last=-1"),
        ({"budget": "much"}, "budget=much: must be bytes, .* or auto"),
        ({"host_budget": "1GB"}, "host_budget=1GB: must be bytes"),
        ({"prefetch": -1}, "prefetch=-1: must be bytes"),
        ({"min_bytes": "x"}, "min_bytes=x: must be bytes"),
        ({"predicate": "nowhere.at.all"}, "predicate=nowhere.at.all: cannot be imported .*ModuleNotFound"),
        ({"predicate": "wanted"}, "predicate=wanted: cannot be imported"),
        ({"predicate": ".wanted"}, "predicate=.wanted: cannot be imported"),
        ({"predicate": "os.sep"}, "predicate=os.sep: is not a function"),
        ({"weights": swapping()}, "weights=tensor_swap: moves activations itself"),
        ({"weights": SaveOnCpu(Resident())}, "weights=save_on_cpu: moves activations itself"),
        ({"pin": "on"}, "pin=on: must be auto or off"),
    ],
)
def test_knobs_that_do_not_fit_are_refused(knobs: dict, message: str):
    with pytest.raises(ValueError, match=message):
        swapping(**knobs).footprint(Stack())


def test_keeping_the_last_blocks_of_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match=r"keep_last=1: this model has no list of blocks"):
        swapping(keep_last=1).footprint(nn.Linear(2, 2))


@pytest.mark.parametrize("layers", [["blocks.*.up"], ["blocks.*.up", "blocks.*.down"]])
def test_layers_inside_recomputed_blocks_are_refused(layers: list):
    """Forward saves nothing in there, so nothing would be swapped."""
    mode = swapping(layers=layers)
    with pytest.raises(ValueError, match="these lie inside blocks that recompute=block computes again"):
        mode.footprint(Stack(), recompute=True)
    mode.footprint(Stack())
    swapping(layers=[*layers, "stem"]).footprint(Stack(), recompute=True)
