"""A directory that no other command writes to: two that start in one second would have the same name."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from omegaconf import OmegaConf


def register() -> None:
    """Makes `${fresh:PATH}` known to OmegaConf: the path of a directory that it makes.

    One value is kept for a configuration and its copies, so that all who read the key get the same directory.
    """
    OmegaConf.register_new_resolver("fresh", fresh_directory, use_cache=True, replace=True)


def fresh_directory(path: str) -> str:
    """Makes the directory `path`, or where that exists `path-2`, `path-3` and so on, and returns the one it made.

    Where a directory cannot be made, it returns `path`, and who writes there says why.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            candidate = path if number == 1 else f"{path}-{number}"
            try:
                Path(candidate).mkdir()
            except FileExistsError:
                continue
            return candidate
    except OSError:
        return path
