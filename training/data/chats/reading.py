"""Reads the rows of chats: dictionaries from .jsonl, .json and .parquet files, or of a dataset of the Hub.

What a template renders must be what the file says. Arrow gives every struct of a column the keys of all rows, those
that a row lacks as None. So JSON is read as JSON, and such keys are dropped where a row came through Arrow, but not in
columns of `Json`, in which the library `datasets` keeps values as they are.
"""

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.data.hub_rows import open_rows
from training.data.local_files import Rows, find_files, import_datasets, json_lines, json_rows, read_each
from training.errors import as_user_error, first_line

EXTENSIONS = (".jsonl", ".json", ".parquet")
USE_LOCAL_FILES = "or train on local files with dataset.files=PATH"


def read_files(patterns: str | Sequence[str] | None, key: str = "dataset.files") -> Rows:
    """Yields the rows of local files, with file and place. Raises UserError, naming `key`, for one it cannot read."""
    files = find_files(patterns, key, EXTENSIONS)
    return read_each(files, key, lambda file: _named(f"{file}", READERS[file.suffix.lower()](file)))


def read_hub(name: str, config_name: str | None, split: str, revision: str | None, folder: str) -> Rows:
    """Yields the rows of a dataset of the Hub, or of a local folder. `folder` is where metadata of the dataset goes.

    Raises UserError as `open_rows` does, and for a file that cannot be read.
    """
    rows = open_rows(name, config_name, split, revision=revision, folder=folder, otherwise=USE_LOCAL_FILES)
    # The library raises about ten types of error, without a common base class.
    with as_user_error(f"dataset.name={name}: ", Exception):
        yield from _named(f"dataset.name={name}", _of_arrow(rows))


def _named(source: str, rows: Rows) -> Rows:
    return ((f"{source} {place}", row) for place, row in rows)


def _read_json(file: Path) -> Rows:
    return json_rows(file, lambda value: [value])


def _read_parquet(file: Path) -> Rows:
    # As a pattern, a name with brackets would match other files.
    datasets = import_datasets()
    try:
        rows = datasets.Dataset.from_parquet(glob.escape(str(file)), streaming=True)
        yield from _of_arrow(rows)
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(first_line(error.__cause__ or error)) from error


def _of_arrow(rows: Any) -> Rows:
    """Yields the rows of a dataset of the library `datasets` without the keys that Arrow has added."""
    from datasets import Json

    def is_json(feature: Any) -> bool:
        inner = getattr(feature, "feature", None)
        inner = feature[0] if isinstance(feature, list) and len(feature) == 1 else inner
        return isinstance(feature, Json) or (inner is not None and is_json(inner))

    as_written = {name for name, feature in (rows.features or {}).items() if is_json(feature)}
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", {name: row[name] if name in as_written else _without_none(row[name]) for name in row}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


READERS = {".jsonl": json_lines, ".json": _read_json, ".parquet": _read_parquet}
