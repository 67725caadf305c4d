"""Reads local corpora with the `datasets` library, as pairs (text, document_ends).

`document_ends` is True for the last piece of a document.
"""

import glob
import json
import logging
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from training.errors import UserError, first_line
from training.runs.paths import home_expanded

BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
ROWS_PER_READ = 1000

# Tests contain broken sources on purpose and are mostly tables. The other folders are not part of the library.
NOT_STDLIB_SOURCE = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "lib2to3", "site-packages", "test", "tests"}
)


def import_datasets() -> ModuleType:
    """Imports the `datasets` library (0.6 s) with progress bars, duplicate logs and download counts off."""
    import datasets

    # Otherwise every load_dataset, even of a local file, sends a request to a server that counts downloads.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.disable_progress_bars()
    # Its file readers log the errors that they also raise.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    return datasets


def stdlib_files() -> list[Path]:
    """Lists the .py files of the running Python's standard library, sorted by their path within it."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_STDLIB_SOURCE]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def read_stdlib(cache_dir: str | Path | None = None) -> Iterator[tuple[str, bool]]:
    """Yields each source file of the standard library as one document, except files that are not UTF-8.

    Raises:
        UserError: this Python has no source files.
    """
    files = stdlib_files()
    if not files:
        raise UserError(
            f"dataset=stdlib: no sources under {sysconfig.get_path('stdlib')} (a Python without its .py files?); "
            "use dataset=text dataset.files=PATH"
        )
    with scratch_folder(cache_dir) as folder:
        rows = _open_rows("text", files, folder, sample_by="document", encoding_errors="replace")
        for row in rows:
            # encoding_errors="replace" puts this character where bytes are not UTF-8.
            if row["text"] and "\N{REPLACEMENT CHARACTER}" not in row["text"]:
                yield row["text"], True


def find_files(patterns: str | Sequence[str] | None) -> list[Path]:
    """Resolves paths and glob patterns (`**` is recursive) to files: each file once, each pattern's matches sorted.

    Raises:
        UserError: no pattern is given, a pattern matches no file, a path is a folder, or BUILDERS lacks an extension.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns or [])
    if not patterns or not all(patterns):
        raise UserError("dataset.files is empty: give dataset.files=PATH (.txt, .jsonl, .json or .parquet)")
    found: dict[Path, None] = {}
    for pattern in patterns:
        found.update(dict.fromkeys(_matching_files(pattern)))
    return list(found)


def _matching_files(pattern: str) -> list[Path]:
    path = home_expanded("dataset.files", pattern)
    if path.is_dir():
        raise UserError(f"dataset.files={pattern} is a folder: name the files in it, as in '{path}/**/*.txt'")
    if path.exists():
        paths = [path]
    elif glob.has_magic(pattern):
        paths = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        paths = [match for match in paths if match.is_file()]
        if not paths:
            raise UserError(f"dataset.files={pattern} matches no file (looked from {Path.cwd()})")
    else:
        raise UserError(f"dataset.files={pattern}: no such file (looked from {Path.cwd()})")
    for path in paths:
        if path.suffix.lower() not in BUILDERS:
            raise UserError(f"dataset.files={path}: cannot read '{path.suffix}' files; give {', '.join(BUILDERS)}")
    return [path.absolute() for path in paths]


def read_files(
    files: Sequence[Path], text_column: str, cache_dir: str | Path | None = None
) -> Iterator[tuple[str, bool]]:
    """Yields the documents of local files: a .txt file is one document, and so is each row of any other file.

    Rows with an empty text are skipped. A .txt file is yielded in pieces of ROWS_PER_READ lines, so that a file of
    any size fits in memory.

    Raises:
        UserError: a file cannot be read or does not have the format of its extension; or it has no column
            `text_column`, or that column does not contain text.
    """
    with scratch_folder(cache_dir) as folder:
        for file in files:
            if file.stat().st_size == 0:
                continue
            is_plain = BUILDERS[file.suffix.lower()] == "text"
            reader = _read_text(file, folder) if is_plain else _read_rows(file, text_column, folder)
            try:
                yield from reader
            # Arrow, JSON and Unicode errors are all ValueErrors.
            except (OSError, ValueError) as error:
                reason = (isinstance(error, ValueError) and _broken_line(file)) or first_line(error)
                raise UserError(f"dataset.files: cannot read {file}: {reason}; repair or remove this file") from error


def _read_text(file: Path, folder: str) -> Iterator[tuple[str, bool]]:
    for lines in _open_rows("text", [file], folder, keep_linebreaks=True).iter(batch_size=ROWS_PER_READ):
        yield "".join(lines["text"]), False
    yield "", True


def _read_rows(file: Path, text_column: str, folder: str) -> Iterator[tuple[str, bool]]:
    rows = _open_rows(BUILDERS[file.suffix.lower()], [file], folder)
    if BUILDERS[file.suffix.lower()] == "parquet" and text_column in rows.column_names:
        rows = _open_rows("parquet", [file], folder, columns=[text_column])  # reads only this column's pages
    for columns in rows.iter(batch_size=ROWS_PER_READ):
        check_column(text_column, columns, str(file))
        for text in columns[text_column]:
            if is_text(text, text_column, str(file)):
                yield text, True


def check_column(text_column: str, columns: Iterable[str], source: str) -> None:
    """Raises UserError if `source`, whose columns are `columns`, has no column `text_column`."""
    if text_column not in columns:
        raise UserError(
            f"dataset.text_column={text_column}: no such column in {source}; it has {', '.join(columns) or 'none'}"
        )


def is_text(value: Any, text_column: str, source: str) -> bool:
    """Returns True for a value to train on: a text that is neither null nor empty.

    Raises:
        UserError: the value has another type, such as a number, a date or a list.
    """
    if value is not None and not isinstance(value, str):
        raise UserError(
            f"dataset.text_column={text_column}: contains {type(value).__name__}, not text, in {source}; "
            "name a column that contains only text"
        )
    return bool(value)


@contextmanager
def scratch_folder(cache_dir: str | Path | None) -> Iterator[str]:
    """Makes a temporary folder below `cache_dir` and removes it at the end.

    `datasets` writes lock files even where it caches nothing.
    """
    parent = None if cache_dir is None else Path(cache_dir)
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="datasets-", dir=parent) as folder:
            yield folder
    finally:
        if parent is not None and not any(parent.iterdir()):
            parent.rmdir()


def _open_rows(builder: str, files: Sequence[Path], folder: str, **options: Any) -> Any:
    """Opens files as an iterable of rows, which are read as they are asked for."""
    # load_dataset reads every path as a pattern: a name with brackets would silently match nothing.
    names = [glob.escape(str(file)) for file in files]
    return import_datasets().load_dataset(
        builder, data_files={"train": names}, split="train", streaming=True, cache_dir=folder, **options
    )


def _broken_line(file: Path) -> str | None:
    """Names the first line of a .jsonl file that is not JSON; Arrow counts rows from the start of its own block."""
    if file.suffix.lower() != ".jsonl":
        return None
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip():
                    json.loads(line)
            except ValueError as error:
                return f"line {number} is not JSON ({first_line(error)})"
    return None
