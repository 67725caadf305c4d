"""One training step as a timeline: what computes, what is copied in and out, and where compute stands still.

    python scripts/trace.py --mode layer_stream --out traces                 # as scripts/bench.py measures it
    python scripts/trace.py --mode bounce_linear:slots=6 --sequences 8 --recompute

Writes DIR/MODE.json.gz, which https://ui.perfetto.dev opens, and DIR/MODE.png, a Gantt chart of the step, and prints
how long each lane was busy. A step of a real run: python train.py trace=true. With --device cpu copies run where they
are called, so that nothing lies beside anything.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench import Workload, parser
from training.profiling.timeline import draw, read_timeline
from training.profiling.trace import VIEWER, recorded


def record(workload: Workload, path: Path, warmup_steps: int = 3) -> None:
    """Runs a few steps and writes the trace of the last one to `path`."""
    with workload:
        for _ in range(warmup_steps):
            workload.step()
        with recorded(path, workload.streams):
            workload.step()


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--mode", default="layer_stream", metavar="MODE[:KEY=VALUE,...]")
    options_parser.add_argument("--out", type=Path, default=Path("traces"), metavar="DIR")
    options = options_parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit(f"error: --device {options.device}: torch finds no GPU; --device cpu shows the order of things")
    options.out.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9.-]", "_", options.mode)
    trace, picture = options.out / f"{name}.json.gz", options.out / f"{name}.png"
    record(Workload(options.mode, options), trace)
    timeline = read_timeline(trace)
    draw(timeline, picture, options.mode)
    print(f"{options.mode}: {timeline.summary()}\n{trace}  (open in {VIEWER})\n{picture}")


if __name__ == "__main__":
    main()
