"""Runs the survey: `scripts/run.sh python -m tests.faults`; 0 cases of a part leave it out."""

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from tests.faults import exits, kills
from tests.faults.outcome import Outcome

# The parts, and how many cases each has by default.
PARTS = {"kills": (kills, 200), "exits": (exits, 10**9)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    for name, (_, cases) in PARTS.items():
        shown = "all" if name == "exits" else cases
        parser.add_argument(f"--{name}", type=int, default=cases, metavar="N", help=f"cases (default: {shown})")
    parser.add_argument("--minutes", type=float, default=60, help="ends with the cases done by then (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (default: 0)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    work, until = Path(tempfile.mkdtemp(prefix="faults-")), time.monotonic() + options.minutes * 60
    outcomes = [Outcome(name, getattr(options, name), until) for name in PARTS]
    for outcome in outcomes:
        if outcome.planned == 0:
            continue
        begin = time.monotonic()
        (work / outcome.part).mkdir()
        try:
            PARTS[outcome.part][0].survey(work / outcome.part, outcome, options.seed)
        except Exception as error:
            traceback.print_exc()
            outcome.wrong.append(f"{outcome.part} stopped: {error}")
        print(f"{outcome} in {time.monotonic() - begin:.0f} s", flush=True)
    if any(outcome.wrong for outcome in outcomes):
        print(f"the files are in {work}")
        return 1
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
