"""Runs the survey: `scripts/run.sh python -m tests.faults`; 0 cases of a part leave it out."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from tests.faults import exits, kills
from tests.faults.outcome import Outcome, table

ALL = 10**9


@dataclass(frozen=True)
class Part:
    """A part of the survey."""

    name: str
    """of its option"""
    cases: int
    """by default"""
    survey: Callable[[Path, Outcome, int], None]
    expected: str


PARTS = (
    Part("kills", 200, kills.survey, "resumes and ends bitwise equal"),
    Part("exits", ALL, exits.survey, "resumes from a whole checkpoint, ends bitwise equal"),
)


def main(arguments: list[str]) -> int:
    options = _parsed(arguments)
    torch.set_num_threads(1)
    work = Path(tempfile.mkdtemp(prefix="faults-"))
    outcomes, until = [], time.monotonic() + options.minutes * 60
    for part in PARTS:
        planned = getattr(options, part.name)
        if planned == 0:
            continue
        outcome = Outcome(part.name, part.expected, planned, until)
        begin = time.monotonic()
        (work / part.name).mkdir()
        try:
            part.survey(work / part.name, outcome, options.seed)
        except Exception as error:
            traceback.print_exc()
            outcome.wrong.append(f"{part.name} stopped: {error}")
        outcome.seconds = time.monotonic() - begin
        outcomes.append(outcome)
        print(f"{part.name}: {outcome.cases} cases in {outcome.seconds:.0f} s", flush=True)
    wrong = any(outcome.wrong for outcome in outcomes)
    print(table(outcomes))
    if wrong:
        print(f"the files are in {work}")
    else:
        shutil.rmtree(work)
    if options.json:
        figures = {
            "command": shlex.join(["python", "-m", "tests.faults", *arguments]),
            "date": date.today().isoformat(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "parts": {outcome.part: outcome.figures() for outcome in outcomes},
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(wrong)


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    for part in PARTS:
        shown = "all" if part.cases == ALL else part.cases
        text = f"cases of this part, which must do this: {part.expected} (default: {shown})"
        parser.add_argument(f"--{part.name}", type=int, default=part.cases, metavar="N", help=text)
    parser.add_argument("--minutes", type=float, default=60, help="ends with the cases done by then (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the figures there too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
