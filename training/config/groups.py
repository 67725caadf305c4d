"""The folder `conf/`: its groups are folders, and their options are files."""

from __future__ import annotations

from pathlib import Path

CONF = Path(__file__).resolve().parents[2] / "conf"


def is_group(name: str) -> bool:
    """Tells whether `name` is a group; one inside another has a slash, as `hydra/launcher`."""
    return (CONF / name).is_dir()


def options_of(group: str) -> list[str]:
    """Returns the names of the group's options in the order of the alphabet; none for what is no group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))
