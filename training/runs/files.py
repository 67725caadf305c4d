"""The names of the files and folders that a run, a plan or a comparison writes, each of them written here only.

`training.runs.checkpoint_files` names the files inside a checkpoint's folder.
"""

import os
from pathlib import Path

from training.errors import UserError

CONFIG_FILE = "config.yaml"
CHOICES_FILE = "choices.yaml"
LOCK_FILE = ".lock"
# Hydra writes it: conf/hydra/job_logging/train.yaml has the name too.
LOG_FILE = "train.log"
# What a job of a sweep prints.
CONSOLE_FILE = "console.log"
PLAN_FILE = "plan.json"
PLAN_PICTURE = "plan_timeline.png"
HARDWARE_FILE = "hardware.json"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
SAMPLES_FOLDER = "samples"
REFERENCE_FILE = "reference.safetensors"
REFERENCE_ORIGIN = "reference.json"
SUMMARY_FILE = "summary.json"
CHECKPOINTS_FOLDER = "checkpoints"
DATASETS_FOLDER = "datasets"
TRACE_FOLDER = "trace"
WANDB_FOLDER = "wandb"

# A file or folder has this suffix until it is complete.
PARTIAL_SUFFIX = ".partial"


def partial_path(path: Path) -> Path:
    """Returns the path under which `path` is written until it is complete."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


# Files of a comparison, in a sweep's directory or where scripts/compare.py is asked to write them.
COMPARE_CSV_FILE = "compare.csv"
COMPARE_MARKDOWN_FILE = "compare.md"
COMPARE_PAGE_FILE = "compare.html"
COMPARE_LATEX_FILE = "compare.tex"
MEMORY_FIGURE = "compare_memory"
TIME_FIGURE = "compare_time"
LOSS_FIGURE = "compare_loss"
FIGURES = (MEMORY_FIGURE, TIME_FIGURE, LOSS_FIGURE)
# The formats of figures; the page has the first.
FIGURE_KINDS = ("png", "pdf", "svg")
# The workspace that scripts/dashboard.py writes.
WORKSPACE_FILE = "wandb_workspace.json"


def home_expanded(key: str, path: str | Path) -> Path:
    """Replaces a leading `~` or `~user` by the home directory. Raises UserError, naming `key`, if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{key}={path}: there is no home directory of that name: give the path in full") from None


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Writes `content` to a temporary file, which then replaces `path`: readers see the old content or the new one.

    With `durable` that holds after a power failure too. If it raises OSError, `path` is as it was before, and the
    temporary file is removed.
    """
    partial = partial_path(path)
    # A leftover may be a pipe or a link, to which the content must not go.
    partial.unlink(missing_ok=True)
    try:
        with open(partial, "xb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
