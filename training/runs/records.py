"""The files that hold a run's measurements: metrics.jsonl, one record for each logged step, and summary.json.

samples.jsonl, one record for each sample, has its form. All are strict JSON. A value that is not finite (a loss that
diverged) is written as null, and its kind under the extra key `nonfinite`: {"train/loss": null, "nonfinite":
{"train/loss": "nan"}}. The readers below restore the float. A value that was not measured is left out, never null.
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
from training.metric_names import COUNTS, METRIC_KEYS, PLANNED, SUMMARY_KEYS
from training.runs.bounded_files import DamagedError, MissingError, json_object, read_bytes, read_lines
from training.runs.files import METRICS_FILE, SUMMARY_FILE, write_whole

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Appends records to `name` in `run_dir`, which must exist; a resumed run continues its file.

    Records of steps after `after_step` are dropped, because the run makes them again; -1 drops all, also the evaluation
    before the first step. Raises UserError if the file cannot be written, or has a line that is not a record.
    """

    def __init__(self, run_dir: Path, after_step: int = -1, name: str = METRICS_FILE):
        self._run_dir = run_dir
        self._path = run_dir / name
        with _disk_errors(run_dir):
            self._path.touch()
            _drop_after(self._path, after_step)

    def sync(self) -> None:
        """Flushes the records to the disk, so that a checkpoint saved next is never newer than them."""
        with _disk_errors(self._run_dir), open(self._path, "ab") as file:
            os.fsync(file.fileno())

    def write(self, record: dict[str, Any]) -> None:
        """Appends `record` as one line, at once. If the disk is full, removes a partial line and raises UserError."""
        line = (_to_json(record) + "\n").encode()
        # Unbuffered: one call writes the line, and closing the file does not try again.
        with _disk_errors(self._run_dir), open(self._path, "ab", buffering=0) as file:
            end = file.tell()
            if file.write(line) != len(line):
                os.truncate(self._path, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Reads the records of a run, without an unfinished last line. Raises UserError for a missing or damaged file."""
    return list(stream_metrics(run_dir))


def stream_metrics(run_dir: Path, name: str = METRICS_FILE) -> Iterator[dict[str, Any]]:
    """Yields what `read_metrics` returns, of the file `name` of the same form, and raises UserError as it does."""
    path = run_dir / name
    with _readable(missing="; name the directory of a run"):
        for number, line in enumerate(read_lines(path), start=1):
            if not line.endswith(b"\n"):
                return
            yield _checked(line, f"{path}: line {number} is not a record")


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Writes `summary.json` in `run_dir` whole or not at all. Raises UserError where that fails, as on a full disk."""
    text = _to_json(summary, indent=2) + "\n"
    with _disk_errors(run_dir):
        write_whole(run_dir / SUMMARY_FILE, text.encode(), durable=True)


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Reads the summary of a run. Raises UserError if there is none, it cannot be read, or it is damaged."""
    path = run_dir / SUMMARY_FILE
    with _readable(missing="; the run is not over or was killed, or this is not the directory of a run"):
        return _checked(read_bytes(path), str(path))


def is_number(value: Any) -> bool:
    """Tells whether a value that was read from JSON is a number, finite or not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _to_json(values: dict[str, Any], indent: int | None = None) -> str:
    nonfinite = {k: str(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    if nonfinite:
        values = {**values, **dict.fromkeys(nonfinite), "nonfinite": nonfinite}
    return json.dumps(values, allow_nan=False, indent=indent)


def _checked(text: bytes, name: str) -> dict[str, Any]:
    """Parses an object, and restores its floats that are not finite. Raises DamagedError if no run writes such one."""
    values = json_object(text, name)
    kinds = values.pop("nonfinite", {})
    if not (isinstance(kinds, dict) and all(kind in ("nan", "inf", "-inf") for kind in kinds.values())):
        raise DamagedError(f"{name}: nonfinite is {reprlib.repr(kinds)}: it must map names to nan, inf or -inf")
    values |= {key: float(kind) for key, kind in kinds.items()}
    for key, value in values.items():
        metric = key.removeprefix(PLANNED)
        if metric in METRIC_KEYS | SUMMARY_KEYS and not is_number(value):
            raise DamagedError(f"{name}: {key} is {reprlib.repr(value)}, not a number")
        if metric in COUNTS and not isinstance(value, int):
            raise DamagedError(f"{name}: {key} is {reprlib.repr(value)}, not a count")
    return values


def _drop_after(path: Path, step: int) -> None:
    """Cuts the file before its first record of a step after `step`, and before a damaged or unfinished line.

    Raises UserError if a record follows that the run would not make again.
    """
    end, cut, damaged = 0, None, None
    with _readable():
        for number, line in enumerate(read_lines(path), start=1):
            record = _record_of(line)
            keep = record is not None and record["train/step"] <= step
            if cut is None and not keep:
                cut, damaged = end, number if record is None and line.endswith(b"\n") else None
            elif damaged is not None and keep:
                raise UserError(f"{path}: line {damaged} is not a record; the file is damaged")
            end += len(line)
    if damaged is not None:
        logger.warning("%s: line %d is not a record: it is cut off with the lines after it", path, damaged)
    if cut is not None:
        os.truncate(path, cut)


def _record_of(line: bytes) -> dict[str, Any] | None:
    """Returns the record in a line, None if the line has no record with a step, or no end."""
    try:
        record = _checked(line, "")
    except DamagedError:
        return None
    return record if "train/step" in record and line.endswith(b"\n") else None


@contextmanager
def _readable(missing: str = "") -> Iterator[None]:
    """Raises a DamagedError of the block as UserError, with advice behind it where the file is missing."""
    try:
        yield
    except DamagedError as error:
        advice = missing if isinstance(error, MissingError) else "; the file is damaged"
        raise UserError(f"{error}{advice}") from None


@contextmanager
def _disk_errors(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free some space, or choose another place with hydra.run.dir=PATH"
            raise UserError(f"{run_dir}: the disk of the run's directory is full; {advice}") from error
        raise UserError(f"{run_dir}: cannot write to the run's directory ({error.strerror})") from error
