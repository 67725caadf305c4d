"""A saved wandb workspace that compares the runs of a project: modes side by side, in speed, memory and loss.

    python scripts/dashboard.py                                   # writes wandb_workspace.json
    python scripts/dashboard.py --group 2026-11-21-14-02-03       # of one sweep: its directory's last two names
    wandb login && python scripts/dashboard.py --publish          # saves it at wandb, and prints where

The specification is written in every case, without a login or a network. Needs wandb-workspaces (pip install
wandb-workspaces). Runs that were recorded offline show once they are uploaded: wandb sync DIR.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.comparison.wandb_workspace import publish, require_package, specification, workspace
from training.errors import UserError

OUT = Path("wandb_workspace.json")
PROJECT = "offload"


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--project", default=PROJECT, help=f"as tracking.project [{PROJECT}]")
    options.add_argument("--entity", help="wandb user or team, as tracking.entity [your default one]")
    options.add_argument("--group", help="only the runs of this group: tracking.group, or a sweep's")
    options.add_argument("--out", type=Path, default=OUT, metavar="FILE", help=f"for the specification [{OUT}]")
    options.add_argument("--publish", action="store_true", help="save it at wandb too; needs a login")
    return options


def main() -> None:
    options = parser().parse_args()
    require_package()
    built = workspace(options.entity or "", options.project, options.group)
    try:
        options.out.write_text(specification(built))
    except OSError as error:
        raise UserError(f"--out {options.out}: {error.strerror}") from error
    print(f"specification: {options.out}")
    if options.publish:
        print(f"workspace: {publish(built)}")
    else:
        again = shlex.join(["python", *sys.argv])
        print(f"to publish it: wandb login && {again} --publish")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
