"""The message about a key that does not exist."""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Returns one line about a key that does not exist: the one probably meant, and those that exist beside it."""
    parent, _, name = key.rpartition(".")
    prefix = f"{parent}." if parent else ""
    known = sorted(name for name in known if not name.startswith("_") and name != "hydra")
    close = get_close_matches(name, known, n=1)
    meant = f" Did you mean {prefix}{close[0]}?" if close else ""
    where = f"{parent}, as chosen," if parent else "the top level"
    there = f"Keys that {where} has: {', '.join(known)}" if known else f"{where} has no keys"
    return f"{key}: unknown key.{meant} {there}"
