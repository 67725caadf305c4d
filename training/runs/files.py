"""The files that a run writes into its directory by their names, which may not lead out of it."""

from pathlib import Path

from training.errors import UserError

CONFIG_FILE = "config.yaml"
CHOICES_FILE = "choices.yaml"
LOCK_FILE = ".lock"

RUN_FILES = (
    LOCK_FILE,
    CONFIG_FILE,
    CHOICES_FILE,
    "train.log",
    "plan.json",
    "plan_timeline.png",
    "hardware.json",
    "metrics.jsonl",
    "summary.json",
    "summary.json.partial",
)


def refuse_links(run_dir: Path) -> None:
    """Raises UserError where one of `RUN_FILES` is a symbolic link: the run would write over what it leads to."""
    for path in (run_dir / name for name in RUN_FILES):
        if path.is_symlink():
            raise UserError(f"{path} is a link to another file, which a run here would write over: remove the link")
