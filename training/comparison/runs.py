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
from training.metrics.files import is_number, read_metrics, read_summary
from training.metrics.names import PLANNED
from training.metrics.run_summary import summarise
from training.runs.bounded_files import MissingError, UnreadableError, opened, read_json, read_yaml
from training.runs.files import (
    CHOICES_FILE,
    CONFIG_FILE,
    HARDWARE_FILE,
    LOCK_FILE,
    METRICS_FILE,
    PLAN_FILE,
    SUMMARY_FILE,
)
from training.visible_text import shortened

STATUS_WORDS = {"out_of_memory": "out of memory"}
# The statuses of runs that did what they were asked to do, so that their metrics can be compared.
FINISHED = ("ok", "stopped", "planned", "does not fit")
PLANS = ("planned", "does not fit")
# An option that was not chosen.
NONE = ("null", "")

# Folders inside each other; runs and sweeps take four.
DEEPEST = 64
# Settings of a run; more would take hours to compare with those of others.
MOST_SETTINGS = 1000
# Bytes of a memory; a larger number is none.
MOST_BYTES = 2**60
# Characters of a text in a file of a run.
LONGEST_WORD, LONGEST_FACT, LONGEST_REASON = 40, 100, 1000
# Notes of a run.
MOST_NOTES = 20


@dataclass(frozen=True)
class Run:
    """One run of `train.py`, or of any program that writes the same files."""

    directory: Path
    config: dict[str, Any]
    """the nested configuration, every value as text; empty if the run ended before it wrote one"""
    choices: dict[str, str]
    """the option chosen of each configuration group; empty if the run did not record them"""
    status: str
    """ok, stopped, planned, does not fit (a plan), refused, out of memory, failed, interrupted, killed or running"""
    reason: str
    """why the run ended as it did, and what is wrong with its files; empty for a run that ended normally"""
    summary: dict[str, Any]
    """metrics by the names of `training.metrics.names`; of a run without a summary, those of its logged steps"""
    records: list[dict[str, Any]]
    """the logged steps"""
    hardware: dict[str, str]
    """of its machine: `device` and `gpu_name`, as far as they are known"""
    origin: dict[str, str] = field(default_factory=dict)
    """`machine`, `torch`, `commit` and `date`, as far as they are known"""
    notes: tuple[str, ...] = ()
    """how the run differed from what its configuration asks for"""
    forward_only: bool = False
    """its steps had neither backward nor update"""
    command: str = ""
    """the command line of a run that recorded its overrides"""
    misfits: tuple[str, ...] = ()
    """of a plan: which memory does not suffice, `device` or `host` or both"""
    budget_gib: dict[str, float] = field(default_factory=dict)
    """of a plan: what it was to fit in, by `device` and `host`"""

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

    A folder that cannot be looked into is a failed run, whose reason says why.

    Raises:
        UserError: a directory does not exist, or there is no run in any of them.
    """
    found: dict[str, Run] = {}
    unreadable = []
    for directory in directories:
        if not directory.is_dir():
            raise UserError(f"{directory}: no such directory; name the directory of a run or of a sweep")
        for path, damage in _run_directories(directory):
            place = os.path.realpath(path)
            if place not in found:
                found[place] = _unread(path, damage) if damage else read_run(path)
                unreadable += [f"{path}: {damage}"] if damage else []
    if not found:
        names = ", ".join(map(str, directories))
        raise UserError(f"{names}: no run in here; name directories that train.py wrote, as outputs or multirun")
    if len(unreadable) == len(found):
        raise UserError(f"{unreadable[0]}; name directories of runs only")
    return list(found.values())


def read_run(directory: Path) -> Run:
    """Reads the run in `directory`; a missing or damaged file shows in its status and reason and raises no error."""
    damage: list[str] = []
    config = _read(read_yaml, directory / CONFIG_FILE, damage)
    if (count := _settings(config)) > MOST_SETTINGS:
        config = {}
        damage.append(f"{directory / CONFIG_FILE}: it has {count} settings, and a run has at most {MOST_SETTINGS}")
    recorded = _read(read_yaml, directory / CHOICES_FILE, damage)
    choices = recorded.get("choices")
    choices = choices if isinstance(choices, dict) else {}
    plan = _read(read_json, directory / PLAN_FILE, damage)
    hardware = _read(read_json, directory / HARDWARE_FILE, damage)
    status, reason, metrics = _outcome(directory, damage)
    misfits = tuple(_by_memory(plan, "fits", lambda fits: fits is False)) if status == "planned" else ()
    if misfits:
        status = "does not fit"
    records, unreadable = _records(directory)
    if unreadable:
        status, reason = "failed", unreadable
    if steps := [record for record in records if "train/step" in record]:
        warmup_steps = str(config.get("warmup_steps"))
        warmup_steps = int(warmup_steps) if re.fullmatch(r"\d{1,18}", warmup_steps) else 0
        metrics = summarise(steps, warmup_steps=warmup_steps, total_steps=steps[-1]["train/step"]) | metrics
    return Run(
        directory=directory,
        config=config,
        choices={group: option for group, option in choices.items() if isinstance(option, str) and option not in NONE},
        status=shortened(STATUS_WORDS.get(status, status), LONGEST_WORD),
        reason=shortened("; ".join(filter(None, (reason, *damage))), LONGEST_REASON),
        summary=metrics,
        records=records,
        hardware={key: hardware[key] for key in ("device", "gpu_name") if isinstance(hardware.get(key), str)},
        origin=_origin(hardware, plan),
        notes=_notes(metrics.pop("notes", None)),
        forward_only=metrics.pop("forward_only", False) is True,
        command=_command(recorded.get("overrides")),
        misfits=misfits,
        budget_gib={kind: nbytes / 2**30 for kind, nbytes in _by_memory(plan, "budget_bytes", _is_size).items()},
    )


def _unread(directory: Path, reason: str) -> Run:
    return Run(directory, {}, {}, "failed", reason, {}, [], {})


def _run_directories(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yields the directories of runs, and those that cannot be looked into, with the reason; it is empty for a run."""
    # Not recursive: a tree may be deeper than Python's stack.
    waiting = [(directory, 1)]
    while waiting:
        path, depth = waiting.pop()
        if _is_run(path):
            yield path, ""
        elif depth > DEEPEST:
            yield path, f"it is the {depth}th folder inside another, and no run is so deep"
        else:
            try:
                with os.scandir(path) as entries:
                    inside = [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
            except OSError as error:
                yield path, f"it cannot be read ({error.strerror})"
                continue
            visible_ones = [child for child in inside if not child.name.startswith(".")]
            waiting += [(child, depth + 1) for child in sorted(visible_ones, key=_natural, reverse=True)]


def _is_run(directory: Path) -> bool:
    # Whatever has the name of such a file: if it is something else, the row says so.
    if any(os.path.lexists(directory / name) for name in (SUMMARY_FILE, METRICS_FILE, CHOICES_FILE)):
        return True
    # Directories of other programs may hold a config.yaml too, but no lock file.
    return os.path.lexists(directory / CONFIG_FILE) and os.path.lexists(directory / LOCK_FILE)


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Returns a sort key that puts job 10 after job 9."""
    parts = re.split(r"(\d+)", path.name)
    # Not isdigit: a superscript is a digit, and int refuses it.
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]


def _outcome(directory: Path, damage: list[str]) -> tuple[str, str, dict[str, Any]]:
    """Returns status, reason and metrics. A run without a summary is still running or was killed."""
    if not os.path.lexists(directory / SUMMARY_FILE):
        if _is_locked(directory / LOCK_FILE, damage):
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
    if not os.path.lexists(directory / METRICS_FILE):
        return [], ""
    try:
        return read_metrics(directory), ""
    except UserError as error:
        return [], str(error)


def _origin(hardware: dict[str, Any], plan: dict[str, Any]) -> dict[str, str]:
    """Returns the machine and the versions that a run recorded; a plan is made for a machine, not on it."""
    planned_for = plan.get("hardware")
    name = planned_for.get("name") if isinstance(planned_for, dict) else None
    facts = plan | hardware
    facts["machine"] = hardware.get("gpu_name") or hardware.get("cpu_name") or name
    known = {key: facts.get(key) for key in ("machine", "torch", "commit", "date")}
    return {key: shortened(fact, LONGEST_FACT) for key, fact in known.items() if isinstance(fact, str)}


def _by_memory(plan: dict[str, Any], key: str, wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """Returns the `wanted` values under `key` of a plan by memory, `device` or `host`."""
    values = plan.get(key)
    values = values if isinstance(values, dict) else {}
    names = {"vram_budget": "device", "host_budget": "host"}
    return {kind: values[budget] for budget, kind in names.items() if wanted(values.get(budget))}


def _is_size(value: Any) -> bool:
    return is_number(value) and 0 < value < MOST_BYTES


def _notes(notes: Any) -> tuple[str, ...]:
    if not isinstance(notes, list):
        return ()
    return tuple(shortened(note, LONGEST_REASON) for note in notes[:MOST_NOTES] if isinstance(note, str))


def _command(overrides: Any) -> str:
    """Returns the command line of a run; empty if the run did not record its overrides."""
    if not isinstance(overrides, list) or not all(isinstance(override, str) for override in overrides):
        return ""
    return shortened(shlex.join(["python", "train.py", *overrides]), LONGEST_REASON)


def _is_locked(path: Path, damage: list[str]) -> bool:
    """Returns True if another process holds a lock on the file; the system releases it when that process ends."""
    try:
        with opened(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    except MissingError:
        pass
    except (OSError, UnreadableError) as error:
        damage.append(f"{path}: {error}")
    return False


def _settings(config: dict[str, Any]) -> int:
    """Counts the values of a nested configuration."""
    return sum(_settings(value) if isinstance(value, dict) else 1 for value in config.values())


def _read(read: Callable[[Path], dict[str, Any]], path: Path, damage: list[str]) -> dict[str, Any]:
    """Reads a file that describes a run; if that fails, appends the reason to `damage` and returns an empty dict."""
    try:
        return read(path)
    except MissingError:
        return {}
    except UnreadableError as error:
        damage.append(f"{path}: {error}")
        return {}
