"""Forward and backward of a Llama-shaped model under each mode, against the floor measured in the same run.

    python scripts/bench.py --modes none bounce_linear --sequences 2 --seq-len 2048
    python scripts/bench.py --sequences 8 --recompute --json bench.json

Every mode runs in a process of its own. A step ends with the gradients where the mode keeps them: on the device for
`none`, on the host for the streaming modes. The floor of a step is the largest of: the resident step with the same
recompute, bytes in over the bandwidth host to device, bytes out over the bandwidth device to host.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.initialise import initialise
from models.llama import Llama
from offload import registry
from offload.blocks import find_blocks
from offload.memory import HostArena
from offload.modes.bounce_linear import BounceLinear
from offload.modes.none import Resident
from training.clock import StepClock
from training.recompute import recompute
from training.step import forward_backward

MODES = {"none": Resident, "bounce_linear": BounceLinear}
GIB = 2**30


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["none", "bounce_linear"], metavar="MODE[:KEY=VALUE,...]")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--steps", type=int, default=7, help="timed steps, after two for warm-up")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


def bandwidths(device: torch.device, nbytes: int = 256 * 2**20) -> dict[str, float]:
    """Page-locked copies in GB/s, each way alone: the figures the floor is made of."""
    streams = registry.acquire(device)
    arena = HostArena(device)
    host, there = arena.allocate(nbytes, "bandwidth").bytes, torch.empty(nbytes, dtype=torch.uint8, device=device)
    found = {}
    for name, destination, source in (("h2d", there, host), ("d2h", host, there)):
        times_ms = []
        for _ in range(6):
            clock = StepClock(streams)
            clock.start()
            destination.copy_(source)
            clock.stop()
            times_ms += clock.collect()
        found[name] = nbytes / statistics.median(times_ms) / 1e6
    arena.close()
    registry.release(streams)
    return found


def measure(spec: str, options: argparse.Namespace) -> dict:
    """One mode: medians of the timed steps, peaks, and bytes moved a step."""
    name, _, knobs = spec.partition(":")
    device = torch.device(options.device)
    mode = MODES[name](
        **{k: int(v) if v.isdigit() else v for k, _, v in (p.partition("=") for p in knobs.split(",") if p)}
    )
    with torch.device("meta"):
        model = Llama(
            options.vocab, options.hidden, options.intermediate, options.blocks, options.heads, options.heads
        ).bfloat16()
    streams = registry.acquire(device)
    watch = StepClock(streams)
    watch.start()
    mode.attach(model, streams)
    initialise(model, 0, device)
    watch.stop()
    (attach_ms,) = watch.collect()
    if options.recompute:
        recompute(block for _, block in find_blocks(model))
    generator = torch.Generator().manual_seed(0)
    shape = (options.sequences, options.seq_len + 1)
    clock, loss = StepClock(streams), None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for step in range(options.steps + 2):
        batch = torch.randint(options.vocab, shape, generator=generator)
        if step == 2:
            clock.collect()
            before = mode.counters()
        clock.start()
        with mode.step():
            loss = forward_backward(model, batch, options.microbatches, device)
        clock.stop()
        model.zero_grad(set_to_none=True)
    times_ms = clock.collect()
    after = mode.counters()
    cuda = device.type == "cuda"
    return {
        "mode": spec,
        "step_ms": statistics.median(times_ms),
        "step_ms_min": min(times_ms),
        "attach_s": attach_ms / 1e3,
        "vram_peak_gib": torch.cuda.max_memory_allocated(device) / GIB if cuda else 0.0,
        "vram_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB if cuda else 0.0,
        "host_pinned_gib": after["host_pinned_bytes"] / GIB,
        "loss": loss.item(),
        **{key: (after[key] - before[key]) / options.steps for key in ("h2d_bytes", "d2h_bytes", "stall_ms")},
    }


def isolated(function, *values) -> dict:
    """`function(*values)` in a fresh process; a process that dies is a row that says so."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(function, *values).result()
        except BrokenProcessPool:
            return {"mode": values[0], "failed": "the process died"}
        except Exception as error:  # a mode that fails is a row of the table
            return {"mode": values[0], "failed": f"{type(error).__name__}: {error}".splitlines()[0]}


def with_floor(row: dict, resident_ms: float | None, speed: dict[str, float]) -> dict:
    """The row with its floor and the ratio to it; speeds are in GB/s."""
    parts = {way: row[f"{way}_bytes"] / speed[way] / 1e6 for way in ("h2d", "d2h")}
    if resident_ms is not None:
        parts["compute"] = resident_ms
    bound = max(parts, key=parts.get)
    return {**row, "floor_ms": parts[bound], "bound": bound, "ratio": row["step_ms"] / parts[bound]}


def main() -> None:
    options = arguments()
    speed = isolated(bandwidths, torch.device(options.device))
    rows = [isolated(measure, spec, options) for spec in options.modes]
    resident_ms = next((row.get("step_ms") for row in rows if row["mode"] == "none"), None)
    rows = [row if "failed" in row else with_floor(row, resident_ms, speed) for row in rows]
    tokens = options.sequences * options.seq_len
    print(f"{options.blocks} blocks of {options.hidden}, {tokens} tokens, recompute={options.recompute}, "
          f"h2d {speed['h2d']:.1f} GB/s, d2h {speed['d2h']:.1f} GB/s")  # fmt: skip
    print(f"{'mode':32} {'ms':>8} {'floor':>8} {'ratio':>6} {'bound':>8} {'peak GiB':>9} {'in GB':>7} {'out GB':>7} "
          f"{'stall ms':>9} {'pinned GiB':>11} {'attach s':>9}")  # fmt: skip
    for row in rows:
        if "failed" in row:
            print(f"{row['mode']:32} failed: {row['failed']}")
            continue
        print(
            f"{row['mode']:32} {row['step_ms']:8.1f} {row['floor_ms']:8.1f} {row['ratio']:6.3f} {row['bound']:>8} "
            f"{row['vram_peak_gib']:9.2f} {row['h2d_bytes'] / 1e9:7.2f} {row['d2h_bytes'] / 1e9:7.2f} "
            f"{row['stall_ms']:9.1f} {row['host_pinned_gib']:11.2f} {row['attach_s']:9.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps({"options": vars(options), "gb_per_s": speed, "rows": rows}, default=str))


if __name__ == "__main__":
    main()
