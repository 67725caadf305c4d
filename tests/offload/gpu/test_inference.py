"""Forwards in a row on a real device give the resident model's numbers while each stream in turn is late."""

from __future__ import annotations

import pytest
import torch

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from tests.offload.helpers.late import ON_A_GPU
from tests.offload.helpers.models import Stack, assert_same, attached, stack_inputs, with_copy

pytestmark = ON_A_GPU


def forwards(model: Stack, mode) -> list[torch.Tensor]:
    """Forwards of several shapes inside `inference`, a change of the weights, and forwards again."""
    seen = []
    with attached(mode, model, "cuda"):
        for change in range(2):
            with mode.inference():
                for step in range(6):
                    inputs = stack_inputs(step, 0, "cuda")
                    seen.append(model(inputs[: 1 + step % 3]).clone())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 0.1 * change)
        # Outside of it, too.
        with torch.no_grad():
            seen.append(model(stack_inputs(9, 0, "cuda")).clone())
    return seen


@pytest.mark.usefixtures("delayed", "poisoned")
@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("mode", [BounceLinear, LayerStream, lambda slots: ShardOffload(shards=2, slots=slots)])
def test_equals_resident(mode, slots: int):
    streamed, resident = with_copy(Stack(width=64))
    assert_same(forwards(streamed, mode(slots=slots)), forwards(resident, Resident()))
