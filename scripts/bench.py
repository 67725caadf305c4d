"""Forward and backward of Llama-shaped blocks under each mode, against the resident step and the bus of the same run.

    python scripts/bench.py --modes none bounce_linear --sequences 2 --seq-len 2048
    python scripts/bench.py --sequences 8 --recompute --json bench.json
    python scripts/bench.py --model flux --modes none layer_stream --optimizer
    python scripts/bench.py --modes none layer_stream --optimizer --formats compact,bf16 stochastic,int8

With `--model` it is a step of that option of conf/model, with the task, the data and the recompute that it brings;
`--set` changes keys of its configuration (`--set batch_size=2 recompute=none`). With `--optimizer` a step of every mode
but `none` includes the update of its weights on the host, beside the device; `none` is forward and backward alone. With
`--formats` each such mode has a row for each format of the optimizer's states, its master and its moments. With
`--head` the embedding, the head and the loss are there too. Every mode runs in a process of its own. A step ends with
the gradients where the mode keeps them: on the device for `none`, on the host for the streaming modes. The peak printed
is that of the timed steps; the file has the peak of all steps too.

MODE is any option of conf/offload, KEY any of its knobs. Modes that move activations take the option of their weights
as a knob, and its knobs as weights.KEY: `tensor_swap:weights=layer_stream,weights.slots=2`. `budget=auto` needs
`--warmup 16`.

The floor of a step is that of a plan without the FLOPs (`offload.planning.cost_model.floor_ms`): the bytes of the
larger direction at the bandwidth that the bus reached in the same run. `to none` is the ratio to the resident step,
which shows how far compute is the limit. On the CPU there is no bus, and no floor.
"""

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch
from hydra.utils import get_class

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from offload import WeightMode
from offload.knobs import GIB
from offload.planning import Bandwidth, floor_ms, measure_bandwidth
from scripts.workload import make_workload, parsed, parser, timed_steps
from training.config.modes import RESIDENT, mode_options
from training.profiling.hardware import vram_peak_gib, vram_reserved_gib
from training.runs import console, starting
from training.settle.components import acquired
from training.visible_text import visible

# Counters of a mode whose growth in a step is reported.
MOVED = (
    "h2d_bytes", "d2h_bytes", "activation_h2d_bytes", "activation_d2h_bytes", "stall_ms", "update_ms", "update_wait_ms",
)  # fmt: skip
# Title, key of a row, and what to divide by.
COLUMNS = (
    ("step ms", "step_ms", 1),
    ("floor ms", "floor_ms", 1),
    ("to floor", "floor_ratio", 1),
    ("to none", "ratio", 1),
    ("stall ms", "stall_ms", 1),
    ("peak GiB", "vram_peak_gib", 1),
    ("in GB", "h2d_bytes", 1e9),
    ("out GB", "d2h_bytes", 1e9),
    ("acts in", "activation_h2d_bytes", 1e9),
    ("acts out", "activation_d2h_bytes", 1e9),
    ("update ms", "update_ms", 1),
    ("wait ms", "update_wait_ms", 1),
    ("pinned GiB", "host_pinned_gib", 1),
    ("attach s", "attach_s", 1),
)


def weight_modes() -> list[str]:
    """Returns the resident model and the modes that stream weights."""
    targets = {name: option.target for name, option in mode_options().items() if option.target}
    return [name for name, path in targets.items() if name == RESIDENT or issubclass(get_class(path), WeightMode)]


def bandwidths(device: torch.device) -> dict[str, float]:
    """Measures the bus of `device`, in GB/s."""
    with acquired(device) as streams:
        return dataclasses.asdict(measure_bandwidth(streams))


def measure(spec: str, options: argparse.Namespace) -> dict:
    """Measures one mode: medians of the timed steps, peaks, and bytes moved in a step."""
    with make_workload(spec, options) as workload:
        timed, device = timed_steps(workload, options.warmup, options.steps), workload.device
        grown = dataclasses.asdict(timed.grown)
        return {
            "mode": spec,
            "step_ms": statistics.median(timed.times_ms),
            "step_ms_each": timed.times_ms,
            "attach_s": workload.attach_ms / 1e3,
            "vram_peak_gib": vram_peak_gib(device),
            "vram_peak_of_all_gib": max(timed.warmup_peak_gib, vram_peak_gib(device)),
            "vram_reserved_gib": vram_reserved_gib(device),
            "host_pinned_gib": timed.after.host_pinned_bytes / GIB,
            "loss": timed.loss,
            **{key: None if grown[key] is None else grown[key] / options.steps for key in MOVED},
        }


def isolated(function, *values) -> dict:
    """Calls `function(*values)` in a fresh process. A process that dies gives a row that says so."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(function, *values).result()
        except BrokenProcessPool:
            return {"mode": values[0], "failed": "the process died"}
        except Exception as error:  # a mode that fails is a row of the table
            return {"mode": values[0], "failed": f"{type(error).__name__}: {error}".splitlines()[0]}


def with_ratios(row: dict, resident_ms: float | None, bus: Bandwidth | None) -> dict:
    """Returns the row with its floor, and the ratios to it and to the resident step; None where there is none."""
    floor = None if bus is None else floor_ms(bus, row["h2d_bytes"], row["d2h_bytes"])
    ratios = {"floor_ratio": floor and row["step_ms"] / floor, "ratio": resident_ms and row["step_ms"] / resident_ms}
    return {**row, "floor_ms": floor, **ratios}


def described(options: argparse.Namespace) -> str:
    """Names the work that is measured."""
    if options.model:
        return " ".join([f"model={options.model}", *options.set])
    tokens = options.sequences * options.seq_len
    return f"{options.blocks} blocks of {options.hidden}, {tokens} tokens, recompute={options.recompute}"


def rows_of(options: argparse.Namespace) -> Iterator[tuple[str, str, argparse.Namespace]]:
    """Yields the name of each row, its mode and its options: the resident model first, for the ratios to it."""
    for spec in sorted(options.modes, key=lambda spec: spec != RESIDENT):
        if spec == RESIDENT or not options.formats:
            yield spec, spec, options
            continue
        for pair in options.formats:
            master, _, state_dtype = pair.partition(",")
            own = vars(options) | {"master": master, "state_dtype": state_dtype}
            yield f"{spec} {pair}", spec, argparse.Namespace(**own)


def main() -> None:
    starting.expand_segments()
    options_parser = parser(__doc__)
    options_parser.add_argument("--modes", nargs="+", default=weight_modes(), metavar="MODE[:KEY=VALUE,...]")
    options_parser.add_argument("--formats", nargs="+", default=[], metavar="MASTER,STATE_DTYPE", help="of the states")
    options_parser.add_argument("--steps", type=int, default=7, help="timed steps")
    options_parser.add_argument("--warmup", type=int, default=2, help="steps before")
    options_parser.add_argument("--json", type=Path, help="file for the figures")
    options = parsed(options_parser)
    speed = isolated(bandwidths, torch.device(options.device))
    bus = Bandwidth(**speed) if torch.device(options.device).type == "cuda" else None
    print(
        f"{described(options)}, forwards alone={options.forward};"
        f" GB/s in {speed['h2d']:.1f}, out {speed['d2h']:.1f}, both at once {speed['both']:.1f} each"
    )
    print(f"{'mode':36}" + "".join(f"{title:>11}" for title, _, _ in COLUMNS), flush=True)
    rows, resident_ms = [], None
    for name, spec, own in rows_of(options):
        row = isolated(measure, spec, own) | {"row": name}
        if spec == RESIDENT:
            resident_ms = row.get("step_ms")
        rows.append(row if "failed" in row else with_ratios(row, resident_ms, bus))
        figures = ((rows[-1].get(key), scale) for _, key, scale in COLUMNS)
        cells = (f"{'-':>11}" if value is None else f"{value / scale:11.3f}" for value, scale in figures)
        # At once, so that it is there if the rest is stopped.
        print(f"{name:36}" + (f"failed: {visible(row['failed'])}" if "failed" in row else "".join(cells)), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"options": vars(options), "gb_per_s": speed, "rows": rows}, default=str))


if __name__ == "__main__":
    console.tolerate_failures()
    main()
