"""The last sample of each row: a picture, or a text, as the page shows them side by side."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from training.comparison.rows import Row
from training.comparison.runs import Run
from training.errors import UserError
from training.metrics.files import stream_metrics
from training.runs.bounded_files import UnreadableError, read_bytes
from training.runs.files import SAMPLES_FILE, SAMPLES_FOLDER

PNG_BEGIN = b"\x89PNG\r\n\x1a\n"
# A grid of sixteen pictures of 512 pixels has a few MiB.
LARGEST_PICTURE = 2**23
# Characters of a text that the page shows.
LONGEST_TEXT = 4000


@dataclass(frozen=True)
class LastSample:
    """The last sample of the first run of a row.

    Attributes:
        step: steps that were done then.
        picture: the bytes of a PNG file; None for a text.
        text: of a text with its prompt; of a picture what it shows.
        equal_to: the name of the first row with the same sample of the same step, if that is another one.
    """

    row: str
    step: int
    picture: bytes | None
    text: str
    equal_to: str | None = None


def last_samples(rows: Sequence[Row]) -> list[LastSample]:
    """Returns the last sample of each row that has one, in order. Files that cannot be read are left out."""
    found: list[LastSample] = []
    first: dict[tuple[int, str, str], str] = {}
    for row in rows:
        sample = next((sample for run in row.measured if (sample := _last_of(run)) is not None), None)
        if sample is not None:
            step, picture, text = sample
            content = hashlib.sha256(picture or b"").hexdigest()
            name = first.setdefault((step, content, text), row.name)
            found.append(LastSample(row.name, step, picture, text, None if name == row.name else name))
    return found


def _last_of(run: Run) -> tuple[int, bytes | None, str] | None:
    """Returns step, picture and text of a run's last sample; None if it has none that can be shown."""
    try:
        records = deque(stream_metrics(run.directory, SAMPLES_FILE), maxlen=1)
    except UserError:
        return None
    record = records[0] if records else {}
    step = record.get("train/step")
    if type(step) is not int or not 0 <= step < 10**12:
        return None
    if isinstance(record.get("text"), str):
        return step, None, record["text"][:LONGEST_TEXT]
    try:
        # The name follows from the step: a record may name any file.
        picture = read_bytes(run.directory / SAMPLES_FOLDER / f"step-{step:06d}.png", LARGEST_PICTURE)
    except UnreadableError:
        return None
    caption = record.get("caption")
    return (step, picture, caption if isinstance(caption, str) else "") if picture.startswith(PNG_BEGIN) else None
