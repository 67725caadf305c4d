"""Reads dataset.folder: folders of pictures, and how often an epoch shows each picture in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from training.data.images import existing_folder
from training.errors import UserError

# The name of a folder in the layout of kohya's scripts, such as 10_cat.
COUNTED = re.compile(r"\d+_")


def folders_of(folder: str | Sequence[str] | Mapping[str, int]) -> dict[Path, int]:
    """Returns the repeats of each folder, in the order given: of DIR and [DIR, DIR] once, of {DIR: repeats} as said.

    Raises UserError for another value; a folder that is not there, is in another one or is given twice; and without
    repeats, for a name as kohya's scripts have it, whose number would have no effect.
    """
    if isinstance(folder, Mapping):
        given = [(str(name), repeats) for name, repeats in folder.items()]
    else:
        names = [folder] if isinstance(folder, str) else folder
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise UserError(f"dataset.folder={folder}: must be DIR, [DIR, DIR] or {{DIR: repeats}}")
        given = [(name, None) for name in names]
    if not given:
        raise UserError("dataset.folder is empty: give dataset.folder=DIR, [DIR, DIR] or {DIR: repeats}")
    found: dict[Path, int] = {}
    for name, repeats in given:
        path = existing_folder(name)
        if repeats is None:
            _refuse_counted(name, path)
        elif type(repeats) is not int or repeats < 1:
            raise UserError(f"dataset.folder={{{name}: {repeats}}}: repeats must be a whole number of at least 1")
        for other in found:
            first, second = path.resolve(), other.resolve()
            if first.is_relative_to(second) or second.is_relative_to(first):
                raise UserError(
                    f"dataset.folder: {name} and {other} have the same pictures: give one of them, or {{DIR: repeats}}"
                )
        found[path] = repeats or 1
    return found


def _refuse_counted(name: str, path: Path) -> None:
    counted = [
        each for each in (path.absolute(), *sorted(path.iterdir())) if COUNTED.match(each.name) and each.is_dir()
    ]
    if counted:
        first, repeats = counted[0], int(counted[0].name.partition("_")[0])
        shown = name if first == path.absolute() else first
        raise UserError(
            f"dataset.folder={name}: {first.name} is a name with repeats, which are not read: give"
            f" dataset.folder={{{shown}: {repeats}}} with each such folder, or {{{name}: 1}} to show each picture once"
        )
