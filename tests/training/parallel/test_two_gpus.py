"""Two GPUs compute what one does: over NCCL, with shared homes and with their own, whichever stream is late.

The runs are processes of their own: this one must not have begun to use a GPU.
"""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from offload import HostAdamW, acquire, release
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import AttachOptions
from offload.sharing import links as links_module
from offload.sharing import meet
from offload.sharing.cuda_driver import DriverError
from offload.sharing.links import CopyLinks, Links
from tests import ROOT
from tests.offload.helpers.late import DELAY_CYCLES, make_late, poison_slots
from tests.offload.helpers.models import Stack, assert_same, stack_inputs
from tests.offload.helpers.optimizers import SETTINGS
from tests.training.helpers.results import content
from tests.training.helpers.sweeps import wait_for_end, wait_for_metrics
from tests.training.parallel.conftest import RUN, forked
from tests.training.parallel.test_reduce import assert_sum_of_patterns, patterns
from training.parallel.devices import device_of
from training.parallel.group import Group
from training.parallel.messages import Messages
from training.parallel.ranks import ALONE
from training.parallel.reduce import ordered_sum
from training.parallel.sharers import GroupSharers
from training.runs.records import read_metrics, read_summary

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
# Several tests run at once, each with two ranks.
COMMON = [*RUN, "device=auto", "optimizer=host_adamw", "optimizer.threads=2", "precision=bf16"]
TWO = ["devices=2", "microbatches=1"]
DEVICE = "cuda"
SHARED = "parallel.homes=shared"
OWN = "parallel.homes=own"


def run(folder: Path, *overrides: str, launcher: tuple[str, ...] = (), gpus: str = "0,1") -> None:
    command = [sys.executable, *launcher, "train.py", *COMMON, *overrides, f"hydra.run.dir={folder}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def at(run_dir: Path, step: int) -> dict[str, str]:
    return content(run_dir / "checkpoints" / f"step-{step:08d}")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the resident model on one GPU, with two microbatches."""
    folder = tmp_path_factory.mktemp("one")
    run(folder, "offload=none", "microbatches=2")
    return folder


@pytest.mark.parametrize(
    ("mode", "homes"),
    [
        ("none", OWN),
        ("layer_stream", OWN),
        ("tensor_swap", OWN),
        ("layer_stream", SHARED),
        ("bounce_linear", SHARED),
        ("shard_offload", SHARED),
        ("layer_stream_swap", SHARED),
    ],
)
def test_two_gpus_compute_what_the_resident_model_does_on_one(one: Path, tmp_path: Path, mode: str, homes: str):
    run(tmp_path, f"offload={mode}", *TWO, homes)
    assert at(tmp_path, 6) == at(one, 6)


@pytest.mark.parametrize(
    "keys",
    [
        ("optimizer.device_share=40KiB", "offload.outside=stream"),
        ("offload.resident=50%",),
        ("offload.resident=100%",),
        ("optimizer.device_share=40KiB", "clip_norm=null"),
    ],
)
def test_knobs_change_no_bit(one: Path, tmp_path: Path, keys: tuple[str, ...]):
    run(tmp_path, "offload=layer_stream", *TWO, SHARED, *keys)
    assert at(tmp_path, 6) == at(one, 6)


SEQUENCE = ("devices=2", "parallel.sequence=2", "microbatches=2")


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the resident model on two GPUs that divide each sequence."""
    folder = tmp_path_factory.mktemp("divided")
    run(folder, "offload=none", *SEQUENCE)
    return folder


def test_two_gpus_that_divide_sequences_compute_what_one_does_within_rounding(one: Path, divided: Path):
    expected, found = (read_metrics(folder) for folder in (one, divided))
    for record, other in zip(expected, found, strict=True):
        for key in ("train/loss", "train/grad_norm", "eval/loss"):
            assert other.get(key) == pytest.approx(record.get(key), rel=5e-3)


@pytest.mark.parametrize(
    ("mode", "homes"),
    [("layer_stream", OWN), ("layer_stream", SHARED), ("shard_offload", SHARED), ("layer_stream_swap", SHARED)],
)
def test_modes_change_no_bit_where_two_gpus_divide_sequences(divided: Path, tmp_path: Path, mode: str, homes: str):
    run(tmp_path, f"offload={mode}", *SEQUENCE, homes, "recompute=block")
    assert at(tmp_path, 6) == at(divided, 6)


def test_two_hosts_of_one_gpu_each(one: Path, tmp_path: Path):
    port = free_port()

    def host(number: int) -> None:
        nodes = ("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1")
        address = ("--master-addr", "127.0.0.1", "--master-port", str(port))
        launcher = ("-m", "torch.distributed.run", *nodes, *address)
        run(tmp_path, "offload=layer_stream", "microbatches=1", launcher=launcher, gpus=str(number))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(host, (0, 1)))
    assert at(tmp_path, 6) == at(one, 6)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_killed_ends_the_run_at_once(tmp_path: Path, lost: int):
    keys = ("offload=layer_stream", *TWO, SHARED, "steps=1000000", "eval.every=null", "checkpoint.every=null")
    command = [sys.executable, "train.py", *COMMON, *keys, "log_every=1", f"hydra.run.dir={tmp_path}"]
    with open(tmp_path / "console", "w") as console:
        process = subprocess.Popen(command, cwd=ROOT, stdout=console, stderr=console)
    try:
        wait_for_metrics(process, tmp_path, tmp_path / "console")
        ranks = [process.pid, *(child.pid for child in psutil.Process(process.pid).children())]
        os.kill(ranks[lost], signal.SIGKILL)
        assert process.wait(60) != 0
        wait_for_end(ranks[1])
        if lost:
            assert "rank 1: its process was killed (SIGKILL)" in read_summary(tmp_path)["reason"]
    finally:
        process.kill()
        process.wait(300)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def trained(rank: int, folder: Path, count: int, late: str, links: str) -> None:
    """Saves weights and states after a few steps of one of `count` GPUs, which share homes unless it is the only one.

    Slots are filled with NaN when their unit leaves. Kernels that spin go before the work of the stream `late`.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    device = device_of(DEVICE, count, rank)
    # Its updates are the host's too: torch's kernels on a GPU round otherwise.
    ranks, mode = ALONE, LayerStream(slots=2, outside="stream")
    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
        ranks = Group(device, Messages(300))
    torch.manual_seed(0)
    model = Stack(width=64, recompute="non-reentrant").bfloat16()
    microbatches = range(2) if count == 1 else (rank,)

    def loss_of(step: int, index: int) -> torch.Tensor:
        return model(stack_inputs(step, index, str(device)).bfloat16()).float().square().mean() / 2

    with pytest.MonkeyPatch.context() as patch:
        make_late(patch, late)
        if links == "collectives":
            patch.setattr(links_module, "_tried", unreachable)
        poison_slots(patch)
        exchanges = CopyLinks if links == "copies" else GroupSharers
        names = ("gather", "sum", "sum_in_place") if links == "copies" else ("gather", "sum")
        for name in names if late == "gather" else ():
            patch.setattr(exchanges, name, late_exchange(getattr(exchanges, name)))
        streams = acquire(device)
        sharers = ranks.sharers(count > 1)
        attached = mode.attach(model, streams, AttachOptions(sharers=sharers))
        if count > 1:
            assert type(attached._streamer.filler._links) is (CopyLinks if links == "copies" else Links)
        optimizer = HostAdamW(model.parameters(), **SETTINGS, threads=2, decay_norms_and_biases=False)
        attached.overlap(optimizer, True)
        optimizer.allocate()
        for step in range(5):
            with attached.step(norms=links == "collectives"):
                attached.accumulate([partial(loss_of, step, index) for index in microbatches])
            if count > 1:
                ranks.reduce(model, attached.gradient_norms(), attached.summed_parameters())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
        optimizer.states.bring_home()
        meet(sharers, "the updates of all")
        states = optimizer.state_dict()["state"]
        found = [states[index][name] for index in sorted(states) for name in sorted(states[index])]
        found += [*model.state_dict().values()]
        torch.save([tensor.cpu().clone() for tensor in found], folder / f"{rank}.pt")
        meet(sharers, "the end")
        attached.detach()
        release(streams)
        if count > 1:
            ranks.messages.leave()


def summed_patterns(rank: int, folder: Path, count: int) -> None:
    device = device_of(DEVICE, count, rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=count, device_id=device)
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        flat = patterns(rank, dtype).to(device)
        ordered_sum(flat, dist.group.WORLD)
        found[dtype] = flat.cpu()
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_nccl_adds_two_numbers_of_any_kind_as_torch_does(tmp_path: Path):
    for found in forked(summed_patterns, tmp_path, 2, "spawn"):
        for dtype, total in found.items():
            assert_sum_of_patterns(total, dtype)


def unreachable(*_: object) -> None:
    raise DriverError("as where GPUs cannot reach each other's memory")


def late_exchange(exchange):
    def late(self, *options: object) -> None:
        # One rank is later than the other, which may not read what is not there.
        torch.cuda._sleep(DELAY_CYCLES * (1 + torch.cuda.current_device()))
        exchange(self, *options)

    return late


@pytest.mark.parametrize("late", ["nobody", "h2d", "d2h", "compute", "gather"])
@pytest.mark.parametrize("links", ["copies", "collectives"])
def test_streams_that_are_late_change_no_bit(tmp_path: Path, late: str, links: str):
    work = partial(trained, late=late, links=links)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (expected,) = forked(work, tmp_path / "one", 1, "spawn")
    found = forked(work, tmp_path / "two", 2, "spawn")
    for tensors in found:
        assert_same(tensors, expected)
