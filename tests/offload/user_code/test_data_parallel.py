"""DistributedDataParallel around a model with a mode, or inside of one: gradients are summed as without."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from offload import BounceLinear, HostAdamW, LayerStream, Mode, Resident, ShardOffload, acquire, release
from tests.processes import run_processes

MODES: dict[str, Callable[[], Mode]] = {
    "layer_stream": lambda: LayerStream(slots=2, outside="stream"),
    "bounce_linear": lambda: BounceLinear(slots=2),
    "shard_offload": lambda: ShardOffload(shards=2),
}


def small_model() -> nn.Module:
    """Its biases are small: their gradients leave the device together."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(4)))


def trained(mode: Mode, inside: bool, **options: bool) -> list[torch.Tensor]:
    """Makes two steps, of which the second adds to a gradient; returns losses and weights.

    `inside`: the mode has the model that is inside of DistributedDataParallel, and not that itself.
    """
    model, streams = small_model(), acquire("cpu")
    parallel = DistributedDataParallel(model, **options)
    attached = mode.attach(model if inside else parallel, streams)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for step in range(2):
        for microbatch in range(step + 1):
            inputs = torch.randn(5, 7, generator=torch.Generator().manual_seed(3 * step + microbatch + dist.get_rank()))
            with attached.step():
                loss = parallel(inputs).square().mean()
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    attached.detach()
    release(streams)
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def compare(rank: int, folder: Path, name: str) -> None:
    """A rank of two, which ends with an error where the numbers differ."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    for inside in (True, False):
        for options in ({}, {"gradient_as_bucket_view": True}):
            expected, found = (trained(mode, inside, **options) for mode in (Resident(), MODES[name]()))
            assert all(map(torch.equal, expected, found)), (inside, options)
    dist.destroy_process_group()


@pytest.mark.parametrize("name", MODES)
def test_two_processes_compute_what_they_do_without_the_mode(tmp_path: Path, name: str):
    run_processes(compare, [(rank, tmp_path, name) for rank in range(2)], "fork", 120)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A world of this process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_updates_inside_backward_are_refused(alone):
    """They would begin before the gradients are summed."""
    model, mode, streams = small_model(), LayerStream(slots=2), acquire("cpu")
    attached = mode.attach(model, streams)
    attached.overlap(HostAdamW(model.parameters()), early=True)
    parallel = DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match=r"^DistributedDataParallel sums gradients .* early=False"), attached.step():
        parallel(torch.zeros(1, 7))
    attached.detach()
    release(streams)


def test_microbatches_run_one_after_another(alone):
    """Side by side they would be summed once."""
    model, mode, streams = small_model(), ShardOffload(shards=2), acquire("cpu")
    attached = mode.attach(model, streams)
    parallel = DistributedDataParallel(model)
    losses = [lambda: parallel(torch.ones(1, 7)).mean()] * 2
    with pytest.warns(RuntimeWarning, match="they run one after another"), attached.step():
        attached.accumulate(losses)
    with attached.step():
        attached.accumulate(losses)
    attached.detach()
    release(streams)
