"""shard_offload on a real device: the resident model's numbers while every stream in turn is made late."""

import pytest
import torch

from offload.modes import shard_offload
from offload.modes.shard_offload import ShardOffload
from tests.offload.helpers.late import ON_A_GPU, gpu_inputs
from tests.offload.helpers.models import Stack, same_as_resident, under

pytestmark = ON_A_GPU


@pytest.mark.usefixtures("delayed", "poisoned")
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(("checkpoint", "boundary"), [(True, "host"), (True, "device"), (False, "host")])
@pytest.mark.parametrize(("shards", "slots"), [(2, 1), (4, 2)])
def test_equals_resident(
    shards: int, slots: int, checkpoint: bool, boundary: str, microbatches: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shard_offload, "MIN_BOUNDARY_BYTES", 1)
    mode = ShardOffload(shards=shards, slots=slots, checkpoint=checkpoint, boundary=boundary)
    model = Stack(width=64, dropout=0.2)
    same_as_resident(model, mode, gpu_inputs, microbatches=microbatches, device="cuda")


def test_boundary_activations_leave_the_device(monkeypatch: pytest.MonkeyPatch):
    """Between forward and backward the device holds the inputs of one or two blocks only."""
    monkeypatch.setattr(shard_offload, "IN_FLIGHT_BYTES", 1)
    width, tokens, depth = 256, 8192, 8
    held = {}
    for boundary in ("host", "device"):
        model, mode = Stack(width=width, depth=depth), ShardOffload(shards=depth, boundary=boundary)
        with under(mode, model, "cuda") as attached, attached.step():
            before = torch.cuda.memory_allocated()
            x = torch.randn(tokens, 8, device="cuda")
            loss = model(x).square().mean()
            held[boundary] = torch.cuda.memory_allocated() - before
            loss.backward()
    inputs_bytes = depth * tokens * width * 4
    assert held["device"] >= inputs_bytes
    assert held["device"] - held["host"] >= (depth - 2) / depth * inputs_bytes
