"""Reads local text, files or the sources of the standard library, as pairs (text, document_ends), in little memory.

`document_ends` is True for the last piece of a document: one of more than PIECE_CHARACTERS comes in pieces. Reading
takes at most three times the bytes of the longest line (.jsonl), of the longest value and its neighbours up to
BATCH_BYTES (.parquet), or of the whole file (.json, which has no lines to read by).
"""

import glob
import json
import logging
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from training.errors import UserError, first_line
from training.runs.files import home_expanded

ROWS_PER_READ = 1000
PIECE_CHARACTERS = 1 << 16
BATCH_BYTES = 1 << 24
LONGEST_JSON_BYTES = 1 << 30
# Tests contain broken sources on purpose and are mostly tables. The other folders are not part of the library.
NOT_STDLIB_SOURCE = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "lib2to3", "site-packages", "test", "tests"}
)

Pieces = Iterator[tuple[str, bool]]
Rows = Iterator[tuple[str, dict[str, Any]]]
"""pairs (place in the file, row)"""


def find_files(
    patterns: str | Sequence[str] | None,
    key: str = "dataset.files",
    extensions: Sequence[str] = (".txt", ".jsonl", ".json", ".parquet"),
) -> list[Path]:
    """Resolves paths and globs (`**` too) to files, each once, by pattern, sorted. Raises UserError, naming `key`."""
    patterns = [patterns] if isinstance(patterns, str) else list(patterns or [])
    if not patterns or not all(patterns):
        raise UserError(f"{key} is empty: give {key}=PATH ({', '.join(extensions[:-1])} or {extensions[-1]})")
    found: dict[Path, None] = {}
    for pattern in patterns:
        found.update(dict.fromkeys(_matching_files(pattern, key, extensions)))
    return list(found)


def refuse_trained(eval_files: str | Sequence[str], files: str | Sequence[str]) -> None:
    """Raises UserError for a file of dataset.eval_files that is one of dataset.files too, in which it is trained on."""
    trained = {path.resolve() for path in find_files(files)}
    for path in find_files(eval_files, "dataset.eval_files"):
        if path.resolve() in trained:
            raise UserError(
                f"dataset.eval_files: {path} is one of dataset.files, and so trained on: leave it out there"
            )


def _matching_files(pattern: str, key: str, extensions: Sequence[str]) -> list[Path]:
    path = home_expanded(key, pattern)
    if path.is_dir():
        raise UserError(f"{key}={pattern} is a folder: name the files in it, as in '{path}/**/*{extensions[0]}'")
    if path.exists():
        paths = [path]
    elif glob.has_magic(pattern):
        paths = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        paths = [match for match in paths if match.is_file()]
        if not paths:
            raise UserError(f"{key}={pattern} matches no file (looked from {Path.cwd()})")
    else:
        raise UserError(f"{key}={pattern}: no such file (looked from {Path.cwd()})")
    for path in paths:
        if path.suffix.lower() not in extensions:
            raise UserError(f"{key}={path}: cannot read '{path.suffix}' files; give {', '.join(extensions)}")
    return [path.absolute() for path in paths]


def read_files(files: Sequence[Path], text_column: str, key: str = "dataset.files") -> Pieces:
    """Yields documents in pieces; a .txt file is a document, in other files each row with a text is one.

    Raises UserError, which names `key`, for a file that cannot be read.
    """
    return read_each(files, key, lambda file: READERS[file.suffix.lower()](file, text_column))


def read_each(files: Sequence[Path], key: str, read: Callable[[Path], Iterator[Any]]) -> Iterator[Any]:
    """Yields what `read` yields of files that are not empty; what it raises becomes a UserError, naming `key`."""
    for file in files:
        if file.stat().st_size == 0:
            continue
        try:
            yield from read(file)
        # Arrow, JSON and Unicode errors are all ValueErrors.
        except (OSError, ValueError) as error:
            raise UserError(f"{key}: cannot read {file}: {first_line(error)}; repair or remove this file") from error


def _read_text(file: Path, text_column: str) -> Pieces:
    # Some editors begin a file with a mark of its encoding, which is no text.
    with file.open(encoding="utf-8-sig") as text:
        piece = text.read(PIECE_CHARACTERS)
        while piece:
            following = text.read(PIECE_CHARACTERS)
            yield piece, not following
            piece = following


def json_lines(file: Path) -> Rows:
    """Yields the rows of a file with an object a line. Raises ValueError for a line that is none."""
    number = 0
    with file.open("rb") as lines:
        while line := lines.readline(LONGEST_JSON_BYTES + 1):
            number += 1
            if len(line) > LONGEST_JSON_BYTES:
                raise ValueError(f"line {number} is longer than {LONGEST_JSON_BYTES >> 20} MiB")
            if not line.isspace():
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                # Not needed any more, and as large as the text.
                del line
                yield f"line {number}", _row(_parsed(text, f"line {number}"), f"line {number}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({first_line(error)})") from error


def _row(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f'{where} is not a JSON object, as {{"text": ...}}')
    return value


def json_rows(file: Path, of_object: Callable[[dict[str, Any]], list[Any]]) -> Rows:
    """Yields the rows of a .json file: a list of objects, an object a line, or one object whose rows `of_object` lists.

    Raises ValueError for another file, or one of more than LONGEST_JSON_BYTES.
    """
    nbytes = file.stat().st_size
    if nbytes > LONGEST_JSON_BYTES:
        limit = f"{LONGEST_JSON_BYTES >> 20} MiB"
        raise ValueError(f"a .json file of more than {limit} is read whole: write an object a line, as .jsonl")
    text = file.read_text(encoding="utf-8-sig")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("the file is nested too deeply") from None
    except ValueError:
        value = None
    del text
    if value is None:
        # An object a line, or not JSON, in which case that reader says where.
        yield from json_lines(file)
        return
    if isinstance(value, dict):
        value = of_object(value)
    if not isinstance(value, list):
        raise ValueError("the file is neither a list of objects nor an object of columns")
    for number, item in enumerate(value, start=1):
        yield f"item {number}", _row(item, f"item {number}")


def _read_json(file: Path, text_column: str) -> Pieces:
    def column_of(value: dict[str, Any]) -> list[dict[str, Any]]:
        columns = {name: column if isinstance(column, list) else [column] for name, column in value.items()}
        check_column(text_column, columns, str(file))
        return [{text_column: item} for item in columns[text_column]]

    return _documents(json_rows(file, column_of), text_column, str(file))


def _documents(rows: Rows, text_column: str, source: str) -> Pieces:
    """Yields the texts of rows. Of ROWS_PER_READ rows at least one must have the column."""
    names: dict[str, None] = {}
    count = 0
    for _, row in rows:
        names.update(dict.fromkeys(row))
        count += 1
        if is_text(row.get(text_column), text_column, source):
            yield from _in_pieces(row[text_column])
        if count == ROWS_PER_READ:
            check_column(text_column, names, source)
            names, count = {}, 0
    if count:
        check_column(text_column, names, source)


def _in_pieces(text: str) -> Pieces:
    for start in range(0, len(text), PIECE_CHARACTERS):
        yield text[start : start + PIECE_CHARACTERS], start + PIECE_CHARACTERS >= len(text)


def _read_parquet(file: Path, text_column: str) -> Pieces:
    from pyarrow import parquet

    with parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as rows:
        check_column(text_column, rows.schema_arrow.names, str(file))
        for group in range(rows.num_row_groups):
            # Only this column's pages are read, few enough rows at a time.
            row_bytes = _uncompressed_bytes(rows.metadata.row_group(group), text_column)
            count = max(min(int(BATCH_BYTES / max(row_bytes, 1)), ROWS_PER_READ), 1)
            for batch in rows.iter_batches(count, row_groups=[group], columns=[text_column], use_threads=False):
                for value in batch.column(0):
                    text = value.as_py()
                    if is_text(text, text_column, str(file)):
                        yield from _in_pieces(text)


def _uncompressed_bytes(group: Any, text_column: str) -> float:
    """Returns the mean bytes of a row of a row group, in one column."""
    chunks = [group.column(index) for index in range(group.num_columns)]
    nbytes = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == text_column)
    return nbytes / max(group.num_rows, 1)


READERS = {
    ".txt": _read_text,
    ".jsonl": lambda file, text_column: _documents(json_lines(file), text_column, str(file)),
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def import_datasets() -> ModuleType:
    """Imports the `datasets` library (0.6 s) with progress bars, duplicate logs and download counts off."""
    import datasets

    # By default each load_dataset, even of a local file, sends a request to a server that counts downloads.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.disable_progress_bars()
    # The library's file readers log the errors that they also raise.
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


def read_stdlib() -> Iterator[tuple[str, bool]]:
    """Yields each source file of the standard library in UTF-8 as one document. Raises UserError where there are none.

    It does not use the `datasets` library: importing it and listing so many files would take a second of every run.
    """
    files = stdlib_files()
    if not files:
        raise UserError(
            f"dataset=stdlib: no sources under {sysconfig.get_path('stdlib')} (a Python without its .py files?); "
            "use dataset=text dataset.files=PATH"
        )
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        except OSError as error:
            raise UserError(
                f"dataset=stdlib: {file} cannot be read ({error.strerror}); use dataset=text dataset.files=PATH"
            ) from error
        # A source file with this character quotes text that was decoded with the wrong encoding.
        if text and "\N{REPLACEMENT CHARACTER}" not in text:
            yield text, True


def check_column(column: str, columns: Iterable[str], source: str, key: str = "text_column") -> None:
    """Raises UserError naming `key` if `source`, whose columns are `columns`, has no column of that name."""
    if column not in columns:
        raise UserError(f"dataset.{key}={column}: no such column in {source}; it has {', '.join(columns) or 'none'}")


def is_text(value: Any, text_column: str, source: str) -> bool:
    """Tells whether a value is a text that is not empty; null counts as empty. Raises UserError for another type."""
    if value is not None and not isinstance(value, str):
        raise UserError(
            f"dataset.text_column={text_column}: contains {type(value).__name__}, not text, in {source}; "
            "name a column that contains only text"
        )
    return bool(value)
