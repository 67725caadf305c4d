"""Reads files that another program may have written, or none at all: what is wrong with one is a line that names it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import yaml

# Far more than any file that is read whole has.
LARGEST_BYTES = 2**24

# Reads every value as text, whatever its tag, and calls nothing.
_Loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


class DamagedError(Exception):
    """A file, or a checkpoint, cannot be used. The message is one line, which names the file and the reason."""


class MissingError(DamagedError):
    """There is no such file."""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading in the block. Raises DamagedError, also for a pipe, for which it would wait."""
    try:
        if path.exists() and not path.is_file():
            raise DamagedError(f"{path}: it is not a file")
        with open(path, "rb") as file:
            yield file
    except FileNotFoundError:
        raise MissingError(f"{path}: no such file") from None
    except OSError as error:
        # Those of libraries that decode it have no number.
        if error.errno is None:
            raise
        raise DamagedError(f"{path}: it cannot be read ({error.strerror})") from None


def read_bytes(path: Path, largest: int = LARGEST_BYTES) -> bytes:
    """Reads a file whole. Raises DamagedError, also if it has more than `largest` bytes."""
    with opened(path) as file:
        # Files of the system have no size beforehand.
        content = file.read(largest + 1) if os.fstat(file.fileno()).st_size <= largest else None
    if content is None or len(content) > largest:
        raise DamagedError(f"{path}: it has more than {largest} bytes, too many for this file")
    return content


def read_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file of any size, with their line ends. Raises DamagedError."""
    with opened(path) as file:
        yield from file


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file of one JSON object. Raises DamagedError for anything else."""
    return json_object(read_bytes(path), str(path))


def json_object(text: bytes, name: str) -> dict[str, Any]:
    """Parses one JSON object. Raises DamagedError for anything else, which names its file `name`."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise DamagedError(f"{name}: it is not JSON") from None
    if not isinstance(values, dict):
        raise DamagedError(f"{name}: it is not a JSON object")
    return values


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a file of one YAML mapping as `parse_yaml` does. Raises DamagedError for anything else."""
    try:
        return parse_yaml(read_bytes(path).decode(), str(path))
    except UnicodeDecodeError:
        raise DamagedError(f"{path}: it is not text in UTF-8") from None


def parse_yaml(text: str, name: str = "the configuration") -> dict[str, Any]:
    """Parses a YAML mapping into dicts and lists of texts. Raises DamagedError for other YAML, and for aliases."""
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _Loader)):
            raise DamagedError(f"{name}: it has YAML aliases, which no configuration has")
        values = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise DamagedError(f"{name}: it is not a plain YAML file") from None
    if not isinstance(values, dict):
        raise DamagedError(f"{name}: it is not a configuration")
    return values


def leaves_of(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys of nested dictionaries with their values."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
