"""Captions of pictures in a folder: a text file beside each picture, or the rows of metadata.jsonl.

A text file has the name of the picture and ends in .txt or .caption, as for kohya's scripts; all of it is the caption.
Rows have `file_name` and `text`, as in the layout "imagefolder" of Hugging Face's datasets.
"""

import posixpath
from collections.abc import Iterator, Sequence
from pathlib import Path

from training.data.images import files_below
from training.data.local_files import json_lines, read_each
from training.errors import UserError
from training.runs.bounded_files import DamagedError, read_bytes

BESIDE = (".txt", ".caption")
ROWS = "metadata.jsonl"
OTHER_ROWS = ("metadata.csv", "metadata.parquet")


def captions_below(root: Path, pictures: Sequence[str]) -> list[str]:
    """Returns the caption of each of `pictures`, which are paths relative to `root`.

    Raises UserError for a picture with no caption or two, and a file of captions that cannot be read.
    """
    if others := [name for name in files_below(root, OTHER_ROWS) if posixpath.basename(name) in OTHER_ROWS]:
        raise UserError(f"dataset.folder={root}: {others[0]} is not read: write its rows to {ROWS}, an object a line")
    found: dict[str, tuple[str, str]] = {}
    for picture, source, caption in (*_beside(root, pictures), *_listed(root, frozenset(pictures))):
        if picture in found:
            raise UserError(
                f"dataset.folder={root}: {picture} has two captions, in {found[picture][0]} and in {source}: keep one"
            )
        found[picture] = source, caption
    if missing := [picture for picture in pictures if picture not in found]:
        raise UserError(
            f"dataset.folder={root}: {len(missing)} of {len(pictures)} pictures have no caption, the first is"
            f" {missing[0]}: write {posixpath.splitext(missing[0])[0]}.txt (an empty file is an empty caption), or a"
            f" row of {ROWS}"
        )
    return [found[picture][1] for picture in pictures]


def _beside(root: Path, pictures: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yields picture, file and caption of the files beside pictures."""
    files = frozenset(files_below(root, BESIDE))
    for picture in pictures:
        for name in (posixpath.splitext(picture)[0] + ending for ending in BESIDE):
            if name in files:
                try:
                    caption = read_bytes(root / name).decode("utf-8-sig").strip()
                except DamagedError as error:
                    raise UserError(f"dataset: cannot read the caption {error}; repair it") from None
                except UnicodeDecodeError:
                    problem = f"dataset: cannot read the caption {root / name}: it is not text in UTF-8; repair it"
                    raise UserError(problem) from None
                # Ends of lines of Windows are other tokens to Qwen.
                yield picture, name, caption.replace("\r\n", "\n")


def _listed(root: Path, pictures: frozenset[str]) -> Iterator[tuple[str, str, str]]:
    """Yields picture, file and caption of the rows of every metadata.jsonl, whose names are relative to its folder."""
    for source in files_below(root, (ROWS,)):
        folder, name = posixpath.split(source)
        if name != ROWS:
            continue
        unknown = []
        for where, row in read_each([root / source], "dataset.folder", json_lines):
            file, caption = row.get("file_name"), row.get("text")
            if not isinstance(file, str) or not isinstance(caption, str):
                raise UserError(
                    f"dataset.folder: {root / source}, {where}: must have texts file_name and text; it has"
                    f" {', '.join(row) or 'nothing'}"
                )
            picture = posixpath.normpath(posixpath.join(folder, file))
            if picture in pictures:
                yield picture, source, caption.strip()
            else:
                unknown.append(file)
        if unknown:
            raise UserError(
                f"dataset.folder: {root / source}: {len(unknown)} rows name no picture below {root}, the first is"
                f" {unknown[0]}: add the pictures, or remove the rows"
            )
