"""The files that hold a run's measurements: metrics.jsonl, one record for each logged step, and summary.json.

Both are strict JSON. A value that is not finite (a loss that diverged) is written as null, and its kind under the extra
key `nonfinite`: {"train/loss": null, "nonfinite": {"train/loss": "nan"}}. The readers below restore the float. A value
that was not measured is left out, never null.
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
from training.runs.files import METRICS_FILE, SUMMARY_FILE, partial_path

logger = logging.getLogger(__name__)

# No time, rate, size or count of any machine is larger.
LARGEST = 1e18
# Sums of larger losses would overflow a float.
LARGEST_LOSS = 1e300


class MetricsWriter:
    """Appends records to `metrics.jsonl` in `run_dir`, which must exist; a resumed run continues its file.

    Args:
        after_step: the step after which the run resumes. Records of later steps are dropped: the run makes them again.

    Raises:
        UserError: the file cannot be written, for example on a full disk, or has a line that is not a record.
    """

    def __init__(self, run_dir: Path, after_step: int = 0):
        self._run_dir = run_dir
        self._path = run_dir / METRICS_FILE
        with _disk_errors(run_dir):
            self._path.touch()
            _drop_incomplete_line(self._path)
            _drop_after(self._path, after_step)

    def sync(self) -> None:
        """Flushes the records to the disk, so that a checkpoint saved next is never newer than them."""
        with _disk_errors(self._run_dir), open(self._path, "ab") as file:
            os.fsync(file.fileno())

    def write(self, record: dict[str, Any]) -> None:
        """Appends `record` as one line; the operating system has it when this returns.

        Raises:
            UserError: the disk is full; the part of the line that was written is removed again.
        """
        line = (_to_json(record) + "\n").encode()
        # Unbuffered: one call writes the line, and closing the file does not try again.
        with _disk_errors(self._run_dir), open(self._path, "ab", buffering=0) as file:
            end = file.tell()
            if file.write(line) != len(line):
                os.truncate(self._path, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Reads the records of a run, in order; a last line that a killed run did not finish is ignored.

    Raises:
        UserError: there is no metrics file, it cannot be read, or it has a line that is not a record.
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
    """Writes `summary.json` in `run_dir` completely or not at all: a reader sees the old file or the new one.

    Raises:
        UserError: the file cannot be written, for example on a full disk.
    """
    path = run_dir / SUMMARY_FILE
    partial = partial_path(path)
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
    """Reads the summary of a run.

    Raises:
        UserError: there is no summary (the run is not over, or was killed), it cannot be read, or it is damaged.
    """
    path = run_dir / SUMMARY_FILE
    content = _content(path, "the run is not over or was killed, or this is not the directory of a run")
    try:
        return _from_json(content)
    except ValueError as error:
        raise UserError(f"{path}: {error}; the file is damaged") from None


def is_number(value: Any) -> bool:
    """Tells whether a value that was read from JSON is a number, finite or not."""
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
    """Parses one JSON object; raises ValueError with the reason if no run writes such an object."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    kinds = values.pop("nonfinite", {})
    if not (isinstance(kinds, dict) and all(kind in ("nan", "inf", "-inf") for kind in kinds.values())):
        raise ValueError(f"nonfinite is {reprlib.repr(kinds)}: it must map names to nan, inf or -inf")
    values |= {key: float(kind) for key, kind in kinds.items()}
    for key, value in values.items():
        _check(key, value)
    return values


def _check(key: str, value: Any) -> None:
    """Raises ValueError if the metric `key` never has such a value."""
    metric = key.removeprefix(PLANNED)
    if metric not in METRIC_KEYS and metric not in SUMMARY_KEYS:
        return
    expected, valid = "a number", is_number(value)
    if valid and metric in COUNTS:
        expected, valid = "a count", isinstance(value, int) and 0 <= value <= LARGEST
    elif valid and metric.startswith("train/"):
        # Infinity is allowed.
        expected, valid = "a number that a loss reaches", not LARGEST_LOSS < abs(value) < math.inf
    elif valid:
        expected, valid = "a quantity", 0 <= value <= LARGEST
    if not valid:
        raise ValueError(f"{key} is {reprlib.repr(value)}, not {expected}")


def _drop_incomplete_line(path: Path) -> None:
    # Otherwise the next record would continue the line that a killed run left unfinished.
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def _drop_after(path: Path, step: int) -> None:
    """Cuts the file before its first record of a step after `step`.

    A line that is not a record, such as a power failure leaves, is cut with the lines after it, which the run makes
    again. Raises UserError if a record follows that the run would not make again.
    """
    *lines, _ = path.read_bytes().split(b"\n")
    records = [_record_of(line) for line in lines]
    to_keep = [record is not None and record["train/step"] <= step for record in records]
    end = to_keep.index(False) if False in to_keep else len(to_keep)
    if end < len(records) and records[end] is None:
        if any(to_keep[end:]):
            raise UserError(f"{path}: line {end + 1} is not a record; the file is damaged")
        logger.warning("%s: line %d is not a record: it is cut off with the lines after it", path, end + 1)
    os.truncate(path, sum(len(line) + 1 for line in lines[:end]))


def _record_of(line: bytes) -> dict[str, Any] | None:
    """Returns the record in a line, None if the line has no record with a step."""
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
