"""Makes a wandb workspace that compares the runs of a project: speed, memory and loss of the modes side by side.

    python scripts/dashboard.py                                   # writes wandb_workspace.json
    python scripts/dashboard.py --group 2026-11-21-14-02-03       # one sweep: the last two names of its directory
    wandb login && python scripts/dashboard.py --publish          # saves it at wandb and prints its address

The specification is written in every case, without a login or a network. This needs wandb-workspaces (pip install
wandb-workspaces). Runs that were recorded offline appear once they are uploaded: wandb sync DIR.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.comparison.wandb_workspace import publish, require_package, specification, workspace
from training.errors import UserError
from training.runs.files import WORKSPACE_FILE
from training.visible_text import visible

PROJECT = "offload"


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--project", default=PROJECT, help=f"the runs' tracking.project [{PROJECT}]")
    options.add_argument("--entity", help="wandb user or team, the runs' tracking.entity [your default one]")
    options.add_argument("--group", help="compare only the runs of this group (tracking.group, which a sweep sets)")
    options.add_argument(
        "--out", type=Path, default=WORKSPACE_FILE, metavar="FILE", help=f"the specification [{WORKSPACE_FILE}]"
    )
    options.add_argument("--publish", action="store_true", help="save the workspace at wandb; needs a login")
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
        sys.exit(f"error: {visible(error)}")
