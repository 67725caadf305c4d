"""The names of the files and folders that a run, a plan or a comparison writes, each of them written here only.

`training.runs.checkpoint_files` names the files inside a checkpoint's folder.
"""

from pathlib import Path

from training.errors import UserError

CONFIG_FILE = "config.yaml"
CHOICES_FILE = "choices.yaml"
LOCK_FILE = ".lock"
# Hydra writes it: conf/hydra/job_logging/train.yaml has the name too.
LOG_FILE = "train.log"
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
    LOG_FILE,
    PLAN_FILE,
    PLAN_PICTURE,
    HARDWARE_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    REFERENCE_FILE,
    REFERENCE_ORIGIN,
    SUMMARY_FILE,
    SUMMARY_FILE + PARTIAL_SUFFIX,
)


def refuse_strange_files(run_dir: Path) -> None:
    """Raises UserError if something other than a file has the name of a file that a run writes.

    A run would overwrite what a link leads to, and wait without end until another program reads from a pipe.
    """
    made = (path for folder in (TRACE_FOLDER, SAMPLES_FOLDER) for path in sorted((run_dir / folder).glob("*step-*")))
    for path in (*(run_dir / name for name in RUN_FILES), *made):
        if path.is_symlink():
            raise UserError(f"{path} is a link to another file, which the run would overwrite: remove the link")
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a file, and the run writes a file of that name: remove it")
