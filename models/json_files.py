"""JSON of models: files that others have written, of which a bad one is an error of one line, and values for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

# A thousand times the largest configuration.
LARGEST_BYTES = 2**22


def read_object(file: Path, advice: str, kind: str = "a configuration", largest: int = LARGEST_BYTES) -> dict[str, Any]:
    """Returns the JSON object in `file`, which is `kind` and has at most `largest` bytes.

    Raises ValueError in one line, which ends with `advice`, if the file is missing, too large, or anything else.
    """
    try:
        if file.exists() and not file.is_file():
            # Reading from a pipe would wait for another program.
            raise ValueError(f"{file} is not a file: {advice}")
        if (nbytes := file.stat().st_size) > largest:
            raise ValueError(f"{file} has {nbytes} bytes, too many for {kind}: {advice}")
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}): {advice}") from None
    try:
        values = json.loads(content, object_hook=_as_number)
    # ValueError: also a number of too many digits, and bytes that are not UTF-8.
    except (ValueError, RecursionError):
        raise ValueError(f"{file} is not JSON: {advice}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} is not {kind}: {advice}")
    return values


def _as_number(values: dict[str, Any]) -> Any:
    """Returns the number that transformers writes as an object, because JSON has no infinity: {"__float__": NAME}."""
    name = values.get("__float__")
    return float(name) if len(values) == 1 and isinstance(name, str) else values


def as_json(value: Any) -> Any:
    """Returns `value` with mappings and sequences of any kind as Python's own, which JSON has; sets are sorted."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(map(as_json, value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_json(item) for item in value]
    return value
