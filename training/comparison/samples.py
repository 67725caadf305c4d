"""The samples of a comparison: what the model of each row made last, equal ones once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from training.comparison.rows import Row
from training.errors import UserError
from training.runs.bounded_files import UnreadableError, read_bytes
from training.runs.files import SAMPLES_FILE, SAMPLES_FOLDER
from training.runs.records import stream_metrics
from training.visible_text import shortened, visible_lines

LONGEST_TEXT, LARGEST_PICTURE = 2000, 4 << 20


@dataclass(frozen=True)
class LastSample:
    """A text, or a caption with its picture (a PNG file), that a run made after `step` steps."""

    step: int
    text: str
    picture: bytes | None


def last_samples(rows: Sequence[Row]) -> dict[LastSample, list[str]]:
    """Returns the last sample of the first run of each row, with the names of the rows that made it."""
    found: dict[LastSample, list[str]] = {}
    for row in rows:
        sample = _last_of(row.measured[0].directory)
        if sample is not None:
            found.setdefault(sample, []).append(row.name)
    return found


def _last_of(directory: Path) -> LastSample | None:
    """Returns None where a run has no samples, or damaged ones, which are in no other row of the page either."""
    try:
        (record,) = deque(stream_metrics(directory, SAMPLES_FILE), maxlen=1)
        step, name = int(record["train/step"]), record.get("picture")
        text = str(record["caption" if name else "text"])
        picture = read_bytes(directory / SAMPLES_FOLDER / Path(str(name)).name, LARGEST_PICTURE) if name else None
    except (UserError, UnreadableError, OSError, ValueError, KeyError, TypeError):
        return None
    return LastSample(step, visible_lines(shortened(text, LONGEST_TEXT)), picture)
