"""Weights of which a process has a part (DTensor), as FSDP2 and tensor parallelism make them, are refused by name."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from offload import BounceLinear, LayerStream, Mode, Resident, ShardOffload, TensorSwap
from offload.streams import registry


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A world of this process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "make", [LayerStream, BounceLinear, ShardOffload, lambda: TensorSwap(weights=Resident())], ids=lambda _: "mode"
)
def test_a_sharded_model_is_refused(make: Callable[[], Mode], frozen: bool, mesh: DeviceMesh, streams):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(not frozen)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    with pytest.raises(ValueError, match=r"^0\.weight is a DTensor, .*: leave out fully_shard") as caught:
        make().attach(model, streams)
    assert "\n" not in str(caught.value)


def test_a_sharded_layer_that_the_mode_leaves_out_is_its_owner_s(mesh: DeviceMesh, streams: registry.Streams):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[1], mesh=mesh)
    mode = BounceLinear(exclude=["1"])
    attached = mode.attach(model, streams)
    with attached.step():
        model(torch.ones(3, 2)).sum().backward()
    assert model[1].bias.grad.full_tensor().tolist() == [3.0, 3.0]
    attached.detach()
