"""Paths as people give them on the command line."""

from pathlib import Path

from training.errors import UserError


def home_expanded(key: str, path: str | Path) -> Path:
    """`path` with a leading `~` or `~user` replaced, which no shell does behind `KEY=`.

    Raises UserError naming `key` where there is no such user, or he has no home.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{key}={path}: there is no home directory of that name: give the path in full") from None
