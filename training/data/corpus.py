"""The sources of the standard library as a corpus, and what the readers of other texts share."""

import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from training.errors import UserError

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


def read_stdlib() -> Iterator[tuple[str, bool]]:
    """Yields each source file of the standard library as one document, except files that are not UTF-8.

    Not by the `datasets` library: importing it and listing so many files would take a second of every run.

    Raises UserError if this Python has no source files, or they cannot be read.
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
        # A source with this character quotes text that was decoded badly.
        if text and "\N{REPLACEMENT CHARACTER}" not in text:
            yield text, True


def check_column(column: str, columns: Iterable[str], source: str, key: str = "text_column") -> None:
    """Raises UserError naming `key` if `source`, whose columns are `columns`, has no column of that name."""
    if column not in columns:
        raise UserError(f"dataset.{key}={column}: no such column in {source}; it has {', '.join(columns) or 'none'}")


def is_text(value: Any, text_column: str, source: str) -> bool:
    """Returns True for a value to train on: a text that is neither null nor empty.

    Raises UserError if the value has another type, such as a number, a date or a list.
    """
    if value is not None and not isinstance(value, str):
        raise UserError(
            f"dataset.text_column={text_column}: contains {type(value).__name__}, not text, in {source}; "
            "name a column that contains only text"
        )
    return bool(value)
