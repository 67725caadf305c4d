"""Reads runs from their directories: settings, status, metrics and hardware.

A directory may hold anything. What is wrong with it becomes the reason in its own row, and never stops the others.
"""

import fcntl
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.errors import UserError
from training.metric_names import PLANNED
from training.metrics.run_summary import summarise
from training.runs.bounded_files import DamagedError, MissingError, read_json, read_yaml
from training.runs.files import (
    CHOICES_FILE,
    CONFIG_FILE,
    HARDWARE_FILE,
    LOCK_FILE,
    METRICS_FILE,
    PLAN_FILE,
    SUMMARY_FILE,
)
from training.runs.records import read_metrics, read_summary
from training.visible_text import shortened

# What a ratio of step times supposes to be equal in both runs.
PLACE = ("host", "torch", "commit")
PLANS = ("planned", "does not fit")
# The statuses of runs that did what they were asked to do, so that their metrics can be compared.
FINISHED = ("ok", "stopped", *PLANS)
# Characters of a text in a file of a run.
LONGEST_WORD, LONGEST_REASON = 40, 1000
MEMORIES = {"vram_budget": "device", "host_budget": "host"}


@dataclass(frozen=True)
class Run:
    """One run of `train.py`, or of any program that writes the same files."""

    directory: Path
    status: str
    """ok, stopped, planned, does not fit (a plan), refused, out of memory, failed, interrupted, killed or running"""
    reason: str = ""
    """why the run ended as it did, and what is wrong with its files"""
    config: dict[str, Any] = field(default_factory=dict)
    """the nested configuration, every value as text; empty if the run ended before it wrote one"""
    choices: dict[str, str] = field(default_factory=dict)
    """the option chosen of each configuration group"""
    summary: dict[str, Any] = field(default_factory=dict)
    """metrics by the names of `training.metric_names`; of a run without a summary, those of its logged steps"""
    records: list[dict[str, Any]] = field(default_factory=list)
    """the logged steps"""
    device: str | None = None
    """the name of the GPU, or cpu; None if the run did not record its hardware"""
    origin: dict[str, str] = field(default_factory=dict)
    """`machine`, `host`, `torch`, `commit` and `date`, as far as they are known"""
    notes: tuple[str, ...] = ()
    """how the run differed from what its configuration asks for, and whether its machine was busy"""
    forward_only: bool = False
    """its steps had neither backward nor update"""
    command: str = ""
    """the command line of a run that recorded its overrides"""
    misfits: tuple[str, ...] = ()
    """of a plan: which memory does not suffice, `device` or `host` or both"""

    @property
    def finished(self) -> bool:
        return self.status in FINISHED

    @property
    def planned(self) -> bool:
        """True for a plan, whose metrics are predictions."""
        return self.status in PLANS

    @property
    def seed(self) -> str | None:
        return str(self.config["seed"]) if "seed" in self.config else None


def find_runs(directories: Sequence[Path]) -> list[Run]:
    """Returns the runs in and below `directories`, each once, in natural order. Raises UserError for none."""
    found: dict[str, Run] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UserError(f"{directory}: no such directory; name the directory of a run or of a sweep")
        for path, damage in _run_directories(directory):
            place = os.path.realpath(path)
            if place not in found:
                found[place] = Run(path, "failed", damage) if damage else read_run(path)
    if not found:
        names = ", ".join(map(str, directories))
        raise UserError(f"{names}: no run in here; name directories that train.py wrote, as outputs or multirun")
    return list(found.values())


def read_run(directory: Path) -> Run:
    """Reads the run in `directory`; a missing or damaged file shows in its status and reason and raises no error."""
    damage: list[str] = []
    config = _read(read_yaml, directory / CONFIG_FILE, damage)
    recorded = _read(read_yaml, directory / CHOICES_FILE, damage)
    plan = _read(read_json, directory / PLAN_FILE, damage)
    hardware = _read(read_json, directory / HARDWARE_FILE, damage)
    status, reason, metrics = _outcome(directory, damage)
    records = []
    try:
        records = read_metrics(directory) if os.path.lexists(directory / METRICS_FILE) else []
    except UserError as error:
        status, reason = "failed", str(error)
    misfits = ()
    if status == "planned":
        misfits = tuple(MEMORIES[key] for key, fits in _dict(plan, "fits").items() if key in MEMORIES and fits is False)
        status = "does not fit" if misfits else status
    if steps := [record for record in records if "train/step" in record]:
        warmup_steps = str(config.get("warmup_steps"))
        warmup_steps = int(warmup_steps) if re.fullmatch(r"\d{1,18}", warmup_steps) else 0
        metrics = summarise(steps, warmup_steps=warmup_steps, total_steps=steps[-1]["train/step"]) | metrics
    notes, forward_only = metrics.pop("notes", None), metrics.pop("forward_only", False)
    overrides = recorded.get("overrides")
    has_command = isinstance(overrides, list) and all(isinstance(each, str) for each in overrides)
    command = shortened(shlex.join(["python", "train.py", *overrides]), LONGEST_REASON) if has_command else ""
    # A plan is made for a machine, not on it.
    facts = {"machine": _dict(plan, "hardware").get("name")} | plan | hardware
    facts["machine"] = hardware.get("gpu_name") or hardware.get("cpu_name") or facts["machine"]
    facts["host"] = " x ".join(str(hardware[key]) for key in ("cpu_cores", "cpu_name") if key in hardware)
    return Run(
        directory=directory,
        status=shortened(status.replace("_", " "), LONGEST_WORD),
        reason=shortened("; ".join(filter(None, (reason, *damage))), LONGEST_REASON),
        config=config,
        choices={
            group: str(option) for group, option in _dict(recorded, "choices").items() if option not in ("null", "")
        },
        summary=metrics,
        records=records,
        device=_text(hardware.get("gpu_name")) or _text(hardware.get("device")).partition(":")[0] or None,
        origin={key: text for key in ("machine", *PLACE, "date") if (text := _text(facts.get(key)))},
        notes=tuple(filter(None, map(_text, notes if isinstance(notes, list) else []))),
        forward_only=forward_only is True,
        command=command,
        misfits=misfits,
    )


def _run_directories(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yields the directories of runs, and those that cannot be looked into, with the reason; it is empty for a run."""
    closed: list[OSError] = []
    for path, folders, _ in os.walk(directory, onerror=closed.append):
        if _is_run(Path(path)):
            yield Path(path), ""
            folders.clear()
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=_natural)
    for error in closed:
        yield Path(error.filename), f"it cannot be read ({error.strerror})"


def _is_run(directory: Path) -> bool:
    # Whatever has the name of such a file: if it is something else, the row says so.
    if any(os.path.lexists(directory / name) for name in (SUMMARY_FILE, METRICS_FILE, CHOICES_FILE)):
        return True
    # Directories of other programs may hold a config.yaml too, but no lock file.
    return os.path.lexists(directory / CONFIG_FILE) and os.path.lexists(directory / LOCK_FILE)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Returns a sort key that puts job 10 after job 9."""
    # Not isdigit: a superscript is a digit, and int refuses it.
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def _outcome(directory: Path, damage: list[str]) -> tuple[str, str, dict[str, Any]]:
    """Returns status, reason and metrics. A run without a summary is still running or was killed."""
    if not os.path.lexists(directory / SUMMARY_FILE):
        if _is_locked(directory / LOCK_FILE, damage):
            return "running", "", {}
        return "killed", f"it left no {SUMMARY_FILE}", {}
    try:
        metrics = read_summary(directory)
    except UserError as error:
        return "failed", str(error), {}
    status, reason = str(metrics.pop("status", "ok")), str(metrics.pop("reason", None) or "")
    if status == "planned":
        metrics = {key.removeprefix(PLANNED): value for key, value in metrics.items()}
    return status, reason, metrics


def _dict(values: dict[str, Any], key: str) -> dict[str, Any]:
    inner = values.get(key)
    return inner if isinstance(inner, dict) else {}


def _text(value: Any) -> str:
    return shortened(value, LONGEST_REASON) if isinstance(value, str) else ""


def _is_locked(path: Path, damage: list[str]) -> bool:
    """Returns True if another process holds a lock on the file; the system releases it when that process ends."""
    # A pipe would be waited for.
    if not path.is_file():
        return False
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        damage.append(f"{path}: it cannot be read ({error.strerror})")
    return False


def _read(read: Callable[[Path], dict[str, Any]], path: Path, damage: list[str]) -> dict[str, Any]:
    """Reads a file that describes a run; if that fails, appends the reason to `damage` and returns an empty dict."""
    try:
        return read(path)
    except DamagedError as error:
        damage += [] if isinstance(error, MissingError) else [str(error)]
        return {}
