"""Forward and backward of Llama-shaped blocks on several GPUs that share the weights of one host, against one GPU.

    python scripts/bench_ranks.py --ranks 2 --sequences 4 --seq-len 2048 --recompute
    python scripts/bench_ranks.py --ranks 2 --sequences 2 --mode bounce_linear --optimizer --fsdp2

The rows: the resident model on each GPU by itself (`none`), all at once, of which the slowest counts, because GPUs that
share weights go at its pace; the mode on one GPU; and the mode on all with the homes shared, where each copies in its
slices and gathers the others'. With `--ddp` also the model resident on each of all GPUs,
in torch's `DistributedDataParallel` (Li et al. 2020), which sums the gradients inside backward as the mode does. With
`--fsdp2` also the model resident on all GPUs together, in torch's `fully_shard` (Zhao et al. 2023) with torchtitan's
settings: float32 masters, sums of gradients in float32; `--fsdp2-offload` has another row with these on the host, under
its CPUOffloadPolicy. The update of all three, with `--optimizer`, is torch's fused AdamW.

A GPU that has rested is faster for some seconds, until its power or temperature limits it: `--warmup 20 --steps 30`
gives figures that last.

Tokens are those of each GPU, and so `scaling` is the mode's step on one GPU over its step on all. A step on several
GPUs includes the sum of the gradients over them, which each sends home in slices. `wait ms` is the time that the host
waits for updates. `in GB` and `out GB` are what crosses one GPU's own link, `weights GB/s` is what arrives in its
slots: the bytes that one GPU alone would copy in, over the step. `host GiB` is the memory of all processes of a row,
where shared memory counts once. Every row runs in processes of its own, each with the N-th part of the cores. With
`--optimizer` a step includes the update, beside the device, of each rank's slices; under `none` it has none.
"""

import argparse
import json
import multiprocessing
import re
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.initialise import initialise
from offload import acquire, find_blocks, recompute, release
from offload.knobs import GIB
from offload.planning import usable_cores
from offload.sharing import NO_SHARERS, Sharers
from scripts.workload import BlocksWorkload, Reduce, blocks, parsed, parser, timed_steps
from training.config.modes import RESIDENT
from training.metrics.step_timer import StepTimer
from training.parallel.devices import device_of, share_cores
from training.parallel.group import Group
from training.parallel.messages import Messages
from training.profiling.hardware import reset_peaks, vram_peak_gib
from training.runs import starting
from training.visible_text import visible

COLUMNS = (
    "step_ms", "to_none", "scaling", "stall_ms", "wait_ms", "in_gb", "out_gb", "weights_gb_s", "peak_gib", "host_gib",
    "loss",
)  # fmt: skip
TITLES = (
    "step ms", "to none", "scaling", "stall ms", "wait ms", "in GB", "out GB", "weights GB/s", "peak GiB", "host GiB",
    "loss",
)  # fmt: skip
FULLY_SHARDED, OFFLOADED, REPLICATED = "fsdp2", "fsdp2 offload", "ddp"


def measure(spec: str, options: argparse.Namespace, sharers: Sharers, reduce: Reduce | None = None) -> dict[str, float]:
    """Measures steps of one rank: medians, and bytes moved in a step. `reduce` sums what the mode does not."""
    with BlocksWorkload(spec, options, sharers) as workload:
        workload.reduce = reduce
        timed = timed_steps(workload, options.warmup, options.steps)
        if workload.optimizer is not None:
            workload.optimizer.finish()
        found = {
            "step_ms": statistics.median(timed.times_ms),
            "stall_ms": timed.grown.stall_ms / options.steps,
            "wait_ms": timed.grown.update_wait_ms / options.steps,
            "in_gb": timed.grown.h2d_bytes / options.steps / 1e9,
            "out_gb": timed.grown.d2h_bytes / options.steps / 1e9,
            "peak_gib": vram_peak_gib(workload.device),
            "host_gib": proportional_gib(),
            "loss": timed.loss,
        }
        sharers.exchange((0,), "the end", patient=True)
        return found


def fully_sharded(model: nn.Module, device: torch.device, offload: bool) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    place = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=place)
    return model


def measure_of_torch(kind: str, options: argparse.Namespace) -> dict[str, float]:
    """Measures steps of one rank of a way that torch has: the model and its states are on the devices, or offloaded."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    model = blocks(options).to_empty(device=device)
    if kind == REPLICATED:
        model.bfloat16()
    initialise(model, 0, device)
    if options.recompute:
        recompute(block for _, block in find_blocks(model))
    if kind == REPLICATED:
        parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    else:
        parallel = fully_sharded(model, device, kind == OFFLOADED)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-5, fused=True) if options.optimizer else None
    tokens = torch.zeros(options.sequences, options.seq_len, dtype=torch.int64, device=device)
    streams = acquire(device)
    clock = StepTimer(streams)
    for step in range(options.warmup + options.steps):
        if step == options.warmup:
            clock.collect()
            reset_peaks(device)
        clock.start()
        loss = parallel(tokens, tokens)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        parallel.zero_grad()
        clock.stop()
    found = {
        "step_ms": statistics.median(clock.collect()),
        "peak_gib": vram_peak_gib(device),
        "host_gib": proportional_gib(),
        "loss": loss.item(),
    }
    release(streams)
    dist.barrier()
    return found


def proportional_gib() -> float:
    """Returns the host memory of this process in GiB, of each page its part among the processes that share it."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"^Pss:\s*(\d+) kB", rollup, re.MULTILINE)[1]) * 1024 / GIB


def measure_rank(rank: int, count: int, folder: str, spec: str, options: argparse.Namespace) -> dict[str, float]:
    """Joins the other ranks through a file in `folder`, and measures this one. A resident model joins none."""
    options.cores = share_cores(usable_cores() // options.ranks)
    device = device_of(options.device, count, rank)
    options.device = str(device)
    if count == 1 or spec == RESIDENT:
        return measure(spec, options, NO_SHARERS)
    is_of_torch = spec in (REPLICATED, FULLY_SHARDED, OFFLOADED)
    backend = "cuda:nccl,cpu:gloo" if is_of_torch and device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=count)
    if is_of_torch:
        try:
            return measure_of_torch(spec, options)
        finally:
            dist.destroy_process_group()
    group = Group(device, Messages(timeout_s=600))
    try:
        return measure(spec, options, group.sharers(shared=True), group.reduce)
    finally:
        group.messages.leave()


def row_of(name: str, spec: str, count: int, options: argparse.Namespace) -> dict:
    """Runs `count` ranks; returns the figures of the slowest under `name`, or the error of one that failed."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(count, mp_context=context) as pool:
        ranks = [pool.submit(measure_rank, rank, count, folder, spec, options) for rank in range(count)]
        try:
            found = [rank.result() for rank in ranks]
        except Exception as error:  # a rank that fails is a row of the table
            return {"name": name, "failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    host_gib = sum(rank["host_gib"] for rank in found)
    return {"name": name, **max(found, key=lambda rank: rank["step_ms"]), "host_gib": host_gib}


def add_rates(row: dict, rows: list[dict]) -> None:
    """Adds to a row the ratio to the resident model, the speed-up over one device, and the weights' GB/s.

    `rows` begin with the row of the resident model, then that of the mode on one device.
    """
    resident, alone = rows[0].get("step_ms"), rows[1] if len(rows) > 1 else {}
    if "failed" not in row:
        row["to_none"] = resident and row["step_ms"] / resident
    if row.get("in_gb") and alone.get("in_gb"):
        row["scaling"] = alone["step_ms"] / row["step_ms"]
        row["weights_gb_s"] = alone["in_gb"] / row["step_ms"] * 1e3


def cell(value: float | None) -> str:
    return f"{'-':>13}" if value is None else f"{value:13.3f}"


def main() -> None:
    starting.expand_segments()
    options_parser = parser(__doc__)
    options_parser.add_argument("--ranks", type=int, default=2, help="GPUs, or processes of the CPU")
    options_parser.add_argument("--mode", default="layer_stream", metavar="MODE[:KEY=VALUE,...]")
    options_parser.add_argument("--ddp", action="store_true", help="with a row of torch's DistributedDataParallel")
    options_parser.add_argument("--fsdp2", action="store_true", help="with a row of torch's fully_shard, resident")
    options_parser.add_argument("--fsdp2-offload", action="store_true", help="with one of it with CPUOffloadPolicy")
    options_parser.add_argument("--steps", type=int, default=7, help="timed steps")
    options_parser.add_argument("--warmup", type=int, default=3, help="steps before")
    options_parser.add_argument("--json", type=Path, help="file for the figures")
    options = parsed(options_parser)
    if options.model is not None or options.head or options.microbatches > 1 or options.forward:
        options_parser.error("blocks alone, with one microbatch: leave --model, --head, --microbatches, --forward out")
    tokens = options.sequences * options.seq_len
    print(
        f"{options.blocks} blocks of {options.hidden}, {tokens} tokens a device, recompute={options.recompute},"
        f" torch {torch.__version__}"
    )
    print(f"{'mode, devices':30}" + "".join(f"{title:>13}" for title in TITLES), flush=True)
    kinds = [(f"none, each of {options.ranks}", RESIDENT, options.ranks)]
    kinds += [(f"{options.mode}, {count}", options.mode, count) for count in (1, options.ranks)]
    wanted = {REPLICATED: options.ddp, FULLY_SHARDED: options.fsdp2, OFFLOADED: options.fsdp2_offload}
    kinds += [(f"{kind}, {options.ranks}", kind, options.ranks) for kind in wanted if wanted[kind]]
    rows: list[dict] = []
    for name, spec, count in kinds:
        rows.append(row := row_of(name, spec, count, options))
        add_rates(row, rows)
        cells = "".join(cell(row.get(key)) for key in COLUMNS)
        print(f"{name:30}" + (f"failed: {visible(row['failed'])}" if "failed" in row else cells), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"options": vars(options), "rows": rows}, default=str))


if __name__ == "__main__":
    main()
