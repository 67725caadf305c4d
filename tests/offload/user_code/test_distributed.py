"""What splits a model over processes is refused: DistributedDataParallel, and DTensors (FSDP2, tensor parallelism)."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Mode
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.streams import registry
from tests.offload.helpers.models import under


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


def test_dtensors_that_another_thread_imports_now_are_nowhere_yet(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("half made"))
    with under(LayerStream(), model := nn.Sequential(nn.Linear(2, 2))) as attached, attached.step():
        model(torch.ones(3, 2)).sum().backward()


def test_a_sharded_layer_that_the_mode_leaves_out_is_its_owner_s(mesh: DeviceMesh, streams: registry.Streams):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[1], mesh=mesh)
    mode = BounceLinear(exclude=["1"])
    attached = mode.attach(model, streams)
    with attached.step():
        model(torch.ones(3, 2)).sum().backward()
    assert model[1].bias.grad.full_tensor().tolist() == [3.0, 3.0]
    attached.detach()


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.usefixtures("mesh")
def test_data_parallel_is_refused(inside: bool):
    model = nn.Sequential(nn.Sequential(nn.Linear(7, 7), nn.Tanh()), nn.Linear(7, 7))
    parallel = DistributedDataParallel(model)
    with under(LayerStream(slots=2), model if inside else parallel) as attached:
        with (
            attached.step(),
            pytest.raises(RuntimeError, match=r"^DistributedDataParallel does not see .* leave it out"),
        ):
            parallel(torch.zeros(1, 7))
        with attached.step():
            model(torch.zeros(1, 7)).sum().backward()
