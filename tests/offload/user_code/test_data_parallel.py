"""DistributedDataParallel around a model with a mode, or inside of one, is refused: it would miss gradients."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from offload.modes.layer_stream import LayerStream
from tests.offload.helpers.models import under


@pytest.mark.parametrize("inside", [True, False])
def test_data_parallel_is_refused(tmp_path: Path, inside: bool):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
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
    dist.destroy_process_group()
