"""Runs as they lie on disk: what their directories say of their settings, their outcome and their figures."""

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

# Among the floors of a plan.
HOST_OPTIMIZER = "host optimizer"

STATUS_WORDS = {"out_of_memory": "out of memory"}
# Runs that did what they were asked to, whose figures stand for their settings.
FINISHED = ("ok", "stopped", "planned", "does not fit")
PLANS = ("planned", "does not fit")

# The parser in C is ten times as fast.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Run:
    """One run of `train.py`, or of any program that writes the same files."""

    directory: Path
    config: dict[str, Any]
    """the configuration, nested; empty where the run ended before it wrote one"""
    choices: dict[str, str]
    """the option chosen of each group, where they were written down"""
    status: str
    """ok, stopped, planned, does not fit (a plan), out of memory, failed, interrupted, killed or running"""
    reason: str
    """one line, empty where there is nothing to say"""
    summary: dict[str, Any]
    """figures under the names of `training.metrics.names`; of a run that did not end, those of the steps it made"""
    records: list[dict[str, Any]]
    """the logged steps"""
    hardware: dict[str, Any]
    """of its machine `device` and `gpu_name`, and `h2d_gb_s` and `d2h_gb_s` of the bus, as far as they are known"""
    floors_ms: dict[str, float]
    """by its plan: compute, copies either way and the host's update, each alone; empty where there is no plan"""

    @property
    def finished(self) -> bool:
        return self.status in FINISHED

    @property
    def seed(self) -> str | None:
        """As the configuration has it; None where it has none."""
        return str(self.config["seed"]) if "seed" in self.config else None

    @property
    def device(self) -> str | None:
        """The GPU by its name, or cpu; None where the run wrote down no hardware."""
        kind = self.hardware.get("device", "").partition(":")[0]
        return self.hardware.get("gpu_name") or kind or None

    @property
    def planned(self) -> bool:
        """Whether its figures are those of a plan."""
        return self.status in PLANS

    @property
    def fits(self) -> bool:
        """Whether there is room for it; of a run that was no plan, nobody doubts it."""
        return self.status != "does not fit"


def find_runs(directories: Sequence[Path]) -> list[Run]:
    """The runs in and below `directories`, each once, in the order of their numbered or dated names.

    Raises:
        UserError: a directory does not exist or cannot be read, or there is no run in any of them.
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
            where = error.filename or directory
            raise UserError(f"{where}: it cannot be read ({error.strerror}); name directories of runs only") from None
    if not found:
        names = ", ".join(map(str, directories))
        raise UserError(f"{names}: no run in here; name directories that train.py wrote, as outputs or multirun")
    return list(found.values())


def read_run(directory: Path) -> Run:
    """What `directory` says of its run; a file that is missing or damaged is part of the answer, never an error."""
    config = _read_yaml(directory / CONFIG_FILE)
    choices = _read_yaml(directory / CHOICES_FILE).get("choices")
    choices = choices if isinstance(choices, dict) else {}
    records, damage = _records(directory)
    plan = _read_json(directory / PLAN_FILE)
    status, reason, figures = _outcome(directory)
    if status == "planned" and _misses_a_budget(plan):
        status = "does not fit"
    if damage:
        status, reason = "failed", damage
    if steps := [record for record in records if "train/step" in record]:
        warmup_steps = config.get("warmup_steps")
        warmup_steps = warmup_steps if isinstance(warmup_steps, int) else 0
        figures = summarise(steps, warmup_steps=warmup_steps, total_steps=steps[-1]["train/step"]) | figures
    return Run(
        directory=directory,
        config=config,
        choices={str(group): option for group, option in choices.items() if isinstance(option, str)},
        status=STATUS_WORDS.get(status, status),
        reason=reason,
        summary=figures,
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
    # Others have a config.yaml too, but hold no lock.
    return (directory / CONFIG_FILE).is_file() and (directory / LOCK_FILE).is_file()


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Sorts job 10 after job 9."""
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]


def _outcome(directory: Path) -> tuple[str, str, dict[str, Any]]:
    """Status, reason and figures; what has no summary goes on, or was killed."""
    if not (directory / SUMMARY_FILE).exists():
        if _is_locked(directory / LOCK_FILE):
            return "running", "", {}
        return "killed", "it left no summary.json", {}
    try:
        summary = read_summary(directory)
    except UserError as error:
        return "failed", str(error), {}
    figures = {key: value for key, value in summary.items() if key not in ("status", "reason")}
    if summary.get("status") == "planned":
        figures = {key.removeprefix(PLANNED): value for key, value in figures.items()}
    return str(summary.get("status", "ok")), str(summary.get("reason") or ""), figures


def _records(directory: Path) -> tuple[list[dict[str, Any]], str]:
    """The logged steps, and what is wrong with their file."""
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
    """Whether another process holds a lock on the file, which ends with the process however that ends."""
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
    # A date that does not exist is an error of value.
    with suppress(OSError, yaml.YAMLError, ValueError, RecursionError):
        content = yaml.load(path.read_text(), Loader=_Loader)
        return content if isinstance(content, dict) else {}
    return {}


def _read_json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else {}
    return {}
