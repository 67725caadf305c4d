"""The files that a run writes into its directory by their names, which may not lead out of it."""

from pathlib import Path

from training.errors import UserError

CONFIG_FILE = "config.yaml"
CHOICES_FILE = "choices.yaml"
LOCK_FILE = ".lock"

# Files of a comparison, in a sweep's directory or where scripts/compare.py is asked to write them.
COMPARE_CSV_FILE = "compare.csv"
COMPARE_MARKDOWN_FILE = "compare.md"
COMPARE_PAGE_FILE = "compare.html"
MEMORY_FIGURE_FILE = "compare_memory.png"
TIME_FIGURE_FILE = "compare_time.png"
LOSS_FIGURE_FILE = "compare_loss.png"
FIGURE_FILES = (MEMORY_FIGURE_FILE, TIME_FIGURE_FILE, LOSS_FIGURE_FILE)
# The workspace that scripts/dashboard.py writes.
WORKSPACE_FILE = "wandb_workspace.json"

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
