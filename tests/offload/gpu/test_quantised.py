"""Quantised frozen weights on a real device give the resident model's numbers while each stream in turn is late."""

from __future__ import annotations

import pytest

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.shard_offload import ShardOffload
from tests.offload.helpers.late import ON_A_GPU
from tests.offload.helpers.quantised import KINDS, Model, same_as_resident

pytestmark = ON_A_GPU

MODES = {
    "bounce_linear": lambda: BounceLinear(slots=2),
    "layer_stream": lambda: LayerStream(slots=1),
    "resident": lambda: LayerStream(slots=2, resident=1),
    "trained on the device": lambda: LayerStream(slots=2, trained="device"),
    "shard_offload": lambda: ShardOffload(shards=3, slots=2),
}


@pytest.mark.usefixtures("delayed", "poisoned")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_resident(kind: str, mode: str):
    same_as_resident(Model(kind), MODES[mode](), device="cuda")


@pytest.mark.usefixtures("delayed", "poisoned")
@pytest.mark.parametrize("kind", KINDS)
def test_equals_resident_where_blocks_are_recomputed(kind: str):
    same_as_resident(Model(kind), LayerStream(slots=1), device="cuda", recomputes=True)
