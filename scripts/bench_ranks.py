"""Forward and backward of Llama-shaped blocks on several GPUs that share the weights of one host, against one GPU.

    python scripts/bench_ranks.py --ranks 2 --sequences 4 --seq-len 2048 --recompute
    python scripts/bench_ranks.py --ranks 2 --sequences 2 --mode bounce_linear --optimizer --reduction fast

The rows: the resident model on one GPU (`none`), the mode on one GPU, and the mode on all with the homes shared, where
each copies in its slices and gathers the others'. Tokens are those of each GPU. A step on several GPUs includes the sum
of the gradients over them, which each sends home in slices. `in GB` and `out GB` are what crosses one GPU's own link,
`weights GB/s` is what arrives in its slots: the bytes that one GPU alone would copy in, over the step. Every row runs
in processes of its own. With `--optimizer` a step includes the update, beside the device, of each rank's slices.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from offload import GIB, NO_SHARERS, Sharers
from scripts.workload import BlocksWorkload, parsed, parser, timed_steps
from training.config.modes import RESIDENT
from training.profiling.hardware import vram_peak_gib
from training.visible_text import visible

COLUMNS = ("step_ms", "to_none", "stall_ms", "in_gb", "out_gb", "weights_gb_s", "peak_gib", "pinned_gib", "loss")
TITLES = ("step ms", "to none", "stall ms", "in GB", "out GB", "weights GB/s", "peak GiB", "pinned GiB", "loss")


def measure(spec: str, options: argparse.Namespace, sharers: Sharers) -> dict[str, float]:
    """Measures steps of one rank: medians, and bytes moved in a step."""
    with BlocksWorkload(spec, options, sharers) as workload:
        timed = timed_steps(workload, options.warmup, options.steps)
        if workload.optimizer is not None:
            workload.optimizer.finish()
        sharers.exchange((0,), "the end", patient=True)
        return {
            "step_ms": statistics.median(timed.times_ms),
            "stall_ms": timed.grown.stall_ms / options.steps,
            "in_gb": timed.grown.h2d_bytes / options.steps / 1e9,
            "out_gb": timed.grown.d2h_bytes / options.steps / 1e9,
            "peak_gib": vram_peak_gib(workload.device),
            "pinned_gib": timed.after.host_pinned_bytes / GIB,
            "loss": timed.loss,
        }


def measure_rank(rank: int, count: int, folder: str, spec: str, options: argparse.Namespace) -> dict[str, float]:
    """Joins the other ranks through a file in `folder`, and measures this one."""
    import torch.distributed as dist

    from training.parallel.devices import device_of, share_cores
    from training.parallel.group import Group
    from training.parallel.setup import Setup

    share_cores(count)
    device = device_of(options.device, count, rank)
    options.device = str(device)
    if count == 1:
        return measure(spec, options, NO_SHARERS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    group = Group(device, Setup(device.type, count, 600, options.reduction))
    try:
        return measure(spec, options, group.sharers(shared=True))
    finally:
        group.leave()


def row_of(name: str, spec: str, count: int, options: argparse.Namespace) -> dict:
    """Runs `count` ranks; returns the figures of the slowest under `name`, or the error of one that failed."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(count, mp_context=context) as pool:
        ranks = [pool.submit(measure_rank, rank, count, folder, spec, options) for rank in range(count)]
        try:
            return {"name": name, **max((rank.result() for rank in ranks), key=lambda found: found["step_ms"])}
        except Exception as error:  # a rank that fails is a row of the table
            return {"name": name, "failed": f"{type(error).__name__}: {error}".splitlines()[0]}


def with_rates(rows: list[dict]) -> list[dict]:
    """Adds the ratio to the resident step, and the rate at which weights arrive."""
    resident, alone = rows[0].get("step_ms"), rows[1].get("in_gb")
    for row in rows:
        if "failed" not in row:
            row["to_none"] = resident and row["step_ms"] / resident
            row["weights_gb_s"] = alone and row["in_gb"] and alone / row["step_ms"] * 1e3
    return rows


def cell(value: float | None) -> str:
    return f"{'-':>13}" if value is None else f"{value:13.3f}"


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--ranks", type=int, default=2, help="GPUs, or processes of the CPU")
    options_parser.add_argument("--mode", default="layer_stream", metavar="MODE[:KEY=VALUE,...]")
    options_parser.add_argument("--reduction", choices=("ordered", "fast"), default="ordered")
    options_parser.add_argument("--steps", type=int, default=7, help="timed steps")
    options_parser.add_argument("--warmup", type=int, default=3, help="steps before")
    options_parser.add_argument("--json", type=Path, help="file for the figures")
    options = parsed(options_parser)
    if options.model is not None or options.head or options.microbatches > 1 or options.forward:
        options_parser.error("blocks alone, with one microbatch: leave --model, --head, --microbatches, --forward out")
    rows = with_rates(
        [
            row_of("none, 1", RESIDENT, 1, options),
            row_of(f"{options.mode}, 1", options.mode, 1, options),
            row_of(f"{options.mode}, {options.ranks} shared", options.mode, options.ranks, options),
        ]
    )
    tokens = options.sequences * options.seq_len
    print(
        f"{options.blocks} blocks of {options.hidden}, {tokens} tokens a device, recompute={options.recompute},"
        f" reduction={options.reduction}, torch {torch.__version__}"
    )
    print(f"{'mode, devices':30}" + "".join(f"{title:>13}" for title in TITLES))
    for row in rows:
        cells = "".join(cell(row.get(key)) for key in COLUMNS)
        print(f"{row['name']:30}" + (f"failed: {visible(row['failed'])}" if "failed" in row else cells))
    if options.json:
        options.json.write_text(json.dumps({"options": vars(options), "rows": rows}, default=str))


if __name__ == "__main__":
    main()
