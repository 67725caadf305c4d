"""Paths as people write them on the command line."""

from pathlib import Path

from training.errors import UserError


def home_expanded(key: str, path: str | Path) -> Path:
    """Replaces a leading `~` or `~user` of `path`, which the shell leaves alone in `KEY=~/file`.

    Raises UserError naming `key` if that user or home directory does not exist.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{key}={path}: there is no home directory of that name: give the path in full") from None
