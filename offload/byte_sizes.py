"""Sizes in bytes as people write them: "2GiB", "512MiB", or a plain number of bytes."""

from __future__ import annotations

from offload.errors import KnobError

GIB = 2**30
UNITS = {"TiB": 2**40, "GiB": GIB, "MiB": 2**20, "KiB": 2**10, "B": 1}


def parse_bytes(key: str, value: str | int) -> int:
    """Returns the number of bytes that `value` stands for: an int, or a string such as "2GiB", "1.5MiB" or "4096".

    Raises KnobError naming `key` and the value for anything else.
    """
    text = str(value).strip()
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    try:
        amount = float(text.removesuffix(unit)) if unit else int(text)
        if amount >= 0:
            return int(amount * UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        pass
    raise KnobError(key, value, "must be bytes, such as 2GiB, 512MiB or 4096")


def format_bytes(nbytes: int) -> str:
    """Returns `nbytes` for people to read: "1.50 GiB" from a quarter of a GiB on, else "12.00 MiB"."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB // 4 else f"{nbytes / 2**20:.2f} MiB"
