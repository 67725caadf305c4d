"""Weights that stay in their files, on a real device: the numbers of memory while each stream in turn is late."""

from pathlib import Path

import pytest
import torch

from offload.files import file_filler
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import AttachOptions
from offload.modes.shard_offload import ShardOffload
from tests.offload.helpers.late import ON_A_GPU
from tests.offload.helpers.mapped import trained, with_low_rank, write_frozen
from tests.offload.helpers.models import Stack, assert_same

pytestmark = ON_A_GPU


@pytest.mark.usefixtures("delayed", "poisoned")
@pytest.mark.parametrize("ring_units", [1, 4])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    ("kind", "knobs"),
    [(LayerStream, {"slots": 2, "trained": "device"}), (ShardOffload, {"shards": 3, "trained": "device"})],
)
def test_numbers_are_those_of_memory(kind, knobs, direct: bool, ring_units: int, tmp_path: Path, monkeypatch):
    def model():
        torch.manual_seed(0)
        return with_low_rank(Stack(width=64, depth=5))

    expected = trained(model(), kind(**knobs), device="cuda")
    monkeypatch.setattr(file_filler, "RING_BLOCKS", ring_units)
    if direct:
        monkeypatch.setattr(file_filler, "free_host_bytes", lambda: 0)
    mapped = model()
    mode, options = kind(source="mapped", **knobs), AttachOptions(spans=write_frozen(mapped, tmp_path))
    assert_same(trained(mapped, mode, device="cuda", options=options), expected)
