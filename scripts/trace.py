"""Traces one training step and draws it as a timeline of compute, copies in, copies out and stalls.

    python scripts/trace.py --mode layer_stream --out traces                 # the step that scripts/bench.py measures
    python scripts/trace.py --mode bounce_linear:slots=6 --sequences 8 --recompute

Writes the trace to DIR/MODE.json.gz, which https://ui.perfetto.dev opens, and a Gantt chart of it to DIR/MODE.png, and
prints how long each lane was busy. With --device cpu copies run where they are called, so nothing overlaps. To trace a
step of a real run: python train.py trace=true.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.workload import Workload, make_workload, parsed, parser
from training.errors import UserError
from training.profiling.timeline import VIEWER, draw_chart, read_timeline, tracing
from training.runs import compose_errors


def record(workload: Workload, path: Path, warmup_steps: int = 3) -> None:
    """Runs `warmup_steps` steps and one more, and writes the trace of that one to `path`."""
    with workload:
        for _ in range(warmup_steps):
            workload.step()
        with tracing(path, workload.streams):
            workload.step()


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--mode", default="layer_stream", metavar="MODE[:KEY=VALUE,...]")
    options_parser.add_argument("--out", type=Path, default=Path("traces"), metavar="DIR")
    options = parsed(options_parser, on_cpu=", which shows the order only")
    name = re.sub(r"[^A-Za-z0-9.-]", "_", options.mode)
    trace, picture = options.out / f"{name}.json.gz", options.out / f"{name}.png"
    with make_workload(options.mode, options) as workload:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {options.out}: {error.strerror}; choose another place") from error
        record(workload, trace)
    timeline = read_timeline(trace)
    draw_chart(timeline, picture, options.mode)
    print(f"{options.mode}: {timeline.summary()}\n{trace}  (open in {VIEWER})\n{picture}")


if __name__ == "__main__":
    compose_errors.run(main)
