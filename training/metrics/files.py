"""What a run measures: the metric names, the files they are written to, and the figures that sum up a run.

Both files are strict JSON, so a value that is not finite (a loss that diverged) is written as null and
named, with its kind, under the extra key `nonfinite`: {"train/loss": null, "nonfinite": {"train/loss":
"nan"}}. The readers below put the float back. A value that was not measured is left out, never null.
"""

import errno
import json
import logging
import math
import os
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from training.errors import UserError
from training.metrics.names import COUNTS, METRIC_KEYS, PLANNED, SUMMARY_KEYS

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
# No time, rate, size or count is larger, whatever the machine.
LARGEST = 1e18
# Sums of larger losses would leave the range of floats.
LARGEST_LOSS = 1e300


class MetricsWriter:
    """Appends records to `metrics.jsonl` in `run_dir`, which must exist; a resumed run goes on with its file.

    Args:
        after_step: the step that the run goes on after. Records of later steps are dropped: it makes them again.

    Raises:
        UserError: the file cannot be written, as when the disk is full, or holds a line that is not a record.
    """

    def __init__(self, run_dir: Path, after_step: int = 0):
        self._run_dir = run_dir
        self._path = run_dir / METRICS_FILE
        with _disk_errors(run_dir):
            self._path.touch()
            _drop_incomplete_line(self._path)
            _drop_after(self._path, after_step)

    def sync(self) -> None:
        """Has what was written on disk, for power failures that a checkpoint is to survive."""
        with _disk_errors(self._run_dir), open(self._path, "ab") as file:
            os.fsync(file.fileno())

    def write(self, record: dict[str, Any]) -> None:
        """Append `record` as one line; the operating system has it by the time this returns.

        Raises:
            UserError: the disk is full; what was written of the line is taken back.
        """
        line = (_to_json(record) + "\n").encode()
        # Unbuffered: one call writes the line, and nothing is retried when the file is closed.
        with _disk_errors(self._run_dir), open(self._path, "ab", buffering=0) as file:
            end = file.tell()
            if file.write(line) != len(line):
                os.truncate(self._path, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run, in order; a last line that a killed run did not finish is ignored.

    Raises:
        UserError: there is no metrics file, it cannot be read, or it holds a line that is not a record.
    """
    path = run_dir / METRICS_FILE
    *lines, _incomplete = _content(path, "name the directory of a run").split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_from_json(line))
        except ValueError as error:
            raise UserError(f"{path}: line {number} is not a record: {error}; the file is damaged") from None
    return records


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Write `summary.json` in `run_dir` whole or not at all: a reader sees the old file or the new one.

    Raises:
        UserError: the file cannot be written, as when the disk is full.
    """
    path = run_dir / SUMMARY_FILE
    partial = path.with_suffix(".json.partial")
    text = _to_json(summary, indent=2) + "\n"
    with _disk_errors(run_dir):
        try:
            with open(partial, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The summary of a run.

    Raises:
        UserError: there is none (the run goes on, or was killed), it cannot be read, or it is damaged.
    """
    path = run_dir / SUMMARY_FILE
    content = _content(path, "the run goes on or was killed, or this is no run's directory")
    try:
        return _from_json(content)
    except ValueError as error:
        raise UserError(f"{path}: {error}; the file is damaged") from None


def is_number(value: Any) -> bool:
    """Whether a value that was read from JSON is a number, finite or not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _to_json(values: dict[str, Any], indent: int | None = None) -> str:
    nonfinite = {k: str(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    if nonfinite:
        values = {**values, **dict.fromkeys(nonfinite), "nonfinite": nonfinite}
    return json.dumps(values, allow_nan=False, indent=indent)


def _content(path: Path, advice: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {advice}") from None
    except OSError as error:
        raise UserError(f"{path}: it cannot be read ({error.strerror}); {advice}") from None


def _from_json(text: bytes) -> dict[str, Any]:
    """What one object of JSON says; raises ValueError with the reason where no run writes such a thing."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    kinds = values.pop("nonfinite", {})
    if not (isinstance(kinds, dict) and all(kind in ("nan", "inf", "-inf") for kind in kinds.values())):
        raise ValueError(f"nonfinite is {reprlib.repr(kinds)}, not nan, inf or -inf by names")
    values |= {key: float(kind) for key, kind in kinds.items()}
    for key, value in values.items():
        _check(key, value)
    return values


def _check(key: str, value: Any) -> None:
    """Raises ValueError where the metric of that name never has such a value."""
    metric = key.removeprefix(PLANNED)
    if metric not in METRIC_KEYS and metric not in SUMMARY_KEYS:
        return
    wanted, found = "a number", is_number(value)
    if found and metric in COUNTS:
        wanted, found = "a count", isinstance(value, int) and 0 <= value <= LARGEST
    elif found and metric.startswith("train/"):
        # Infinite it may be.
        wanted, found = "a number that a loss reaches", not LARGEST_LOSS < abs(value) < math.inf
    elif found:
        wanted, found = "a quantity", 0 <= value <= LARGEST
    if not found:
        raise ValueError(f"{key} is {reprlib.repr(value)}, not {wanted}")


def _drop_incomplete_line(path: Path) -> None:
    # Else the next record would continue the line that a killed run left unfinished.
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def _drop_after(path: Path, step: int) -> None:
    """Cuts the file before its first record of a later step.

    A line that is no record, such as a power failure leaves, is cut with what follows it, which the run makes again.
    Raises UserError where a record follows that the run would not make again.
    """
    *lines, _ = path.read_bytes().split(b"\n")
    records = [_record_of(line) for line in lines]
    to_keep = [record is not None and record["train/step"] <= step for record in records]
    end = to_keep.index(False) if False in to_keep else len(to_keep)
    if end < len(records) and records[end] is None:
        if any(to_keep[end:]):
            raise UserError(f"{path}: line {end + 1} is not a record; the file is damaged")
        logger.warning("%s: line %d is not a record: it is cut off with what follows", path, end + 1)
    os.truncate(path, sum(len(line) + 1 for line in lines[:end]))


def _record_of(line: bytes) -> dict[str, Any] | None:
    """The record in a line, None where there is none that has a step."""
    try:
        record = _from_json(line)
    except ValueError:
        return None
    return record if "train/step" in record else None


@contextmanager
def _disk_errors(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free some space, or choose another place with hydra.run.dir=PATH"
            raise UserError(f"{run_dir}: the disk of the run's directory is full; {advice}") from error
        raise UserError(f"{run_dir}: cannot write to the run's directory ({error.strerror})") from error
