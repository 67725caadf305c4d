"""Reads runs from their directories: settings, status, metrics and hardware."""

import fcntl
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from training.errors import UserError
from training.metrics.files import is_number, read_metrics, read_summary
from training.metrics.names import PLANNED
from training.metrics.run_summary import summarise
from training.runs.files import (
    CHOICES_FILE,
    CONFIG_FILE,
    HARDWARE_FILE,
    LOCK_FILE,
    METRICS_FILE,
    PLAN_FILE,
    SUMMARY_FILE,
)

# The name of the host's update among the floors of a plan.
HOST_OPTIMIZER = "host optimizer"

STATUS_WORDS = {"out_of_memory": "out of memory"}
# The statuses of runs that did what they were asked to do, so that their metrics can be compared.
FINISHED = ("ok", "stopped", "planned", "does not fit")
PLANS = ("planned", "does not fit")

# The parser in C is ten times as fast as the one in Python.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Run:
    """One run of `train.py`, or of any program that writes the same files."""

    directory: Path
    config: dict[str, Any]
    """the nested configuration; empty if the run ended before it wrote one"""
    choices: dict[str, str]
    """the option chosen of each configuration group; empty if the run did not record them"""
    status: str
    """ok, stopped, planned, does not fit (a plan), out of memory, failed, interrupted, killed or running"""
    reason: str
    """why the run ended as it did, in one line; empty for a run that ended normally"""
    summary: dict[str, Any]
    """metrics by the names of `training.metrics.names`; of a run without a summary, those of its logged steps"""
    records: list[dict[str, Any]]
    """the logged steps"""
    hardware: dict[str, Any]
    """of its machine: `device`, `gpu_name`, and the bandwidths `h2d_gb_s` and `d2h_gb_s`, as far as they are known"""
    floors_ms: dict[str, float]
    """planned times of compute, of the copies each way and of the host's update, each alone; empty without a plan"""

    @property
    def finished(self) -> bool:
        return self.status in FINISHED

    @property
    def seed(self) -> str | None:
        """The seed as in the configuration; None if it has none."""
        return str(self.config["seed"]) if "seed" in self.config else None

    @property
    def device(self) -> str | None:
        """The name of the GPU, or cpu; None if the run did not record its hardware."""
        kind = self.hardware.get("device", "").partition(":")[0]
        return self.hardware.get("gpu_name") or kind or None

    @property
    def planned(self) -> bool:
        """True for a plan, whose metrics are predictions."""
        return self.status in PLANS

    @property
    def fits(self) -> bool:
        """False for a plan that does not fit its machine or its budgets."""
        return self.status != "does not fit"


def find_runs(directories: Sequence[Path]) -> list[Run]:
    """Returns the runs in and below `directories`, each once, in the order of their numbered or dated names.

    Raises:
        UserError: a directory does not exist or cannot be read, or none of them holds a run.
    """
    found: dict[Path, Run] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UserError(f"{directory}: no such directory; name the directory of a run or of a sweep")
        try:
            for path in _run_directories(directory):
                if path.resolve() not in found:
                    found[path.resolve()] = read_run(path)
        except OSError as error:
            path = error.filename or directory
            raise UserError(f"{path}: it cannot be read ({error.strerror}); name directories of runs only") from None
    if not found:
        names = ", ".join(map(str, directories))
        raise UserError(f"{names}: no run in here; name directories that train.py wrote, as outputs or multirun")
    return list(found.values())


def read_run(directory: Path) -> Run:
    """Reads the run in `directory`; a missing or damaged file shows in its status and reason and raises no error."""
    config = _read_yaml(directory / CONFIG_FILE)
    choices = _read_yaml(directory / CHOICES_FILE).get("choices")
    choices = choices if isinstance(choices, dict) else {}
    records, damage = _records(directory)
    plan = _read_json(directory / PLAN_FILE)
    status, reason, metrics = _outcome(directory)
    if status == "planned" and _misses_a_budget(plan):
        status = "does not fit"
    if damage:
        status, reason = "failed", damage
    if steps := [record for record in records if "train/step" in record]:
        warmup_steps = config.get("warmup_steps")
        warmup_steps = warmup_steps if isinstance(warmup_steps, int) else 0
        metrics = summarise(steps, warmup_steps=warmup_steps, total_steps=steps[-1]["train/step"]) | metrics
    return Run(
        directory=directory,
        config=config,
        choices={str(group): option for group, option in choices.items() if isinstance(option, str)},
        status=STATUS_WORDS.get(status, status),
        reason=reason,
        summary=metrics,
        records=records,
        hardware=_hardware(_read_json(directory / HARDWARE_FILE)),
        floors_ms=_floors_ms(plan),
    )


def _run_directories(directory: Path) -> Iterator[Path]:
    if _is_run(directory):
        yield directory
        return
    inside = [path for path in directory.iterdir() if path.is_dir() and not path.is_symlink()]
    for path in sorted(inside, key=_natural):
        if not path.name.startswith("."):
            yield from _run_directories(path)


def _is_run(directory: Path) -> bool:
    if any((directory / name).is_file() for name in (SUMMARY_FILE, METRICS_FILE, CHOICES_FILE)):
        return True
    # Directories of other programs may hold a config.yaml too, but no lock file.
    return (directory / CONFIG_FILE).is_file() and (directory / LOCK_FILE).is_file()


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Returns a sort key that puts job 10 after job 9."""
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]


def _outcome(directory: Path) -> tuple[str, str, dict[str, Any]]:
    """Returns status, reason and metrics. A run without a summary is still running or was killed."""
    if not (directory / SUMMARY_FILE).exists():
        if _is_locked(directory / LOCK_FILE):
            return "running", "", {}
        return "killed", f"it left no {SUMMARY_FILE}", {}
    try:
        summary = read_summary(directory)
    except UserError as error:
        return "failed", str(error), {}
    metrics = {key: value for key, value in summary.items() if key not in ("status", "reason")}
    if summary.get("status") == "planned":
        metrics = {key.removeprefix(PLANNED): value for key, value in metrics.items()}
    return str(summary.get("status", "ok")), str(summary.get("reason") or ""), metrics


def _records(directory: Path) -> tuple[list[dict[str, Any]], str]:
    """Returns the logged steps, and why their file cannot be read; that is empty if it can be read."""
    if not (directory / METRICS_FILE).exists():
        return [], ""
    try:
        return read_metrics(directory), ""
    except UserError as error:
        return [], str(error)


def _hardware(facts: dict[str, Any]) -> dict[str, Any]:
    names = {key: facts[key] for key in ("device", "gpu_name") if isinstance(facts.get(key), str)}
    return names | {key: facts[key] for key in ("h2d_gb_s", "d2h_gb_s") if _is_quantity(facts.get(key))}


def _floors_ms(plan: dict[str, Any]) -> dict[str, float]:
    floors_ms = plan.get("floors_ms")
    return {name: ms for name, ms in floors_ms.items() if _is_quantity(ms)} if isinstance(floors_ms, dict) else {}


def _misses_a_budget(plan: dict[str, Any]) -> bool:
    fits = plan.get("fits")
    return isinstance(fits, dict) and any(within is False for within in fits.values())


def _is_quantity(value: Any) -> bool:
    return is_number(value) and 0 <= value < math.inf


def _is_locked(path: Path) -> bool:
    """Returns True if another process holds a lock on the file; the system releases it when that process ends."""
    with suppress(FileNotFoundError, PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def _read_yaml(path: Path) -> dict[str, Any]:
    # ValueError: a date in YAML that does not exist.
    with suppress(OSError, yaml.YAMLError, ValueError, RecursionError):
        content = yaml.load(path.read_text(), Loader=_Loader)
        return content if isinstance(content, dict) else {}
    return {}


def _read_json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else {}
    return {}
