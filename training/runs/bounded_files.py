"""Reads files that another program may have written, or none at all: what is wrong with one is a short reason."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml

# Far more than any file that is read whole has.
LARGEST_BYTES = 2**24

# Reads every value as text, whatever its tag, and calls nothing.
_Loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


class UnreadableError(Exception):
    """A file cannot be used. The message is the reason, in one line without the file's name."""


class MissingError(UnreadableError):
    """There is no such file."""


def opened(path: Path) -> BinaryIO:
    """Opens a file for reading. Raises UnreadableError, also for a pipe, for which it would wait."""
    try:
        if path.exists() and not path.is_file():
            raise UnreadableError("it is not a file")
        return open(path, "rb")
    except FileNotFoundError:
        raise MissingError("no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise UnreadableError(f"it cannot be read ({getattr(error, 'strerror', error)})") from None


def read_bytes(path: Path, largest: int = LARGEST_BYTES) -> bytes:
    """Reads a file whole. Raises UnreadableError, also if it has more than `largest` bytes."""
    try:
        with opened(path) as file:
            # Files of the system have no size beforehand.
            content = file.read(largest + 1) if os.fstat(file.fileno()).st_size <= largest else None
    except OSError as error:
        raise UnreadableError(f"it cannot be read ({error.strerror})") from None
    if content is None or len(content) > largest:
        raise UnreadableError(f"it has more than {largest} bytes, too many for this file")
    return content


def read_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file of any size, with their line ends. Raises UnreadableError."""
    try:
        with opened(path) as file:
            yield from file
    except OSError as error:
        raise UnreadableError(f"it cannot be read ({error.strerror})") from None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file of one JSON object. Raises UnreadableError for anything else."""
    return json_object(read_bytes(path))


def json_object(text: bytes) -> dict[str, Any]:
    """Parses one JSON object. Raises UnreadableError for anything else."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableError("it is not JSON") from None
    if not isinstance(values, dict):
        raise UnreadableError("it is not a JSON object")
    return values


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a file of one YAML mapping as `parse_yaml` does. Raises UnreadableError for anything else."""
    try:
        return parse_yaml(read_bytes(path).decode())
    except UnicodeDecodeError:
        raise UnreadableError("it is not text in UTF-8") from None


def parse_yaml(text: str) -> dict[str, Any]:
    """Parses a YAML mapping into dicts and lists of texts. Raises UnreadableError for other YAML, and for aliases."""
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _Loader)):
            raise UnreadableError("it has YAML aliases, which no configuration has")
        values = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UnreadableError("it is not a plain YAML file") from None
    if not isinstance(values, dict):
        raise UnreadableError("it is not a configuration")
    return values


def leaves_of(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys of nested dictionaries with their values."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
