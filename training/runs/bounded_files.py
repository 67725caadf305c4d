"""Reads files that another program may have written, or none at all: a bad file is an error, never a hang or a crash.

Every reader of the files of a run or a checkpoint is here. A file must be a regular one, which a pipe or a device is
not, and its size and nesting are limited: a parser could otherwise wait, fill the memory or exhaust the stack.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml

# Far more than any file that is read whole has.
LARGEST_BYTES = 2**24
LARGEST_YAML_BYTES = 2**22
# Far longer than any record of a logged step, and a small piece of memory.
LONGEST_LINE = 2**20
DEEPEST = 100
TOO_DEEP = f"it is nested more than {DEEPEST} deep"
# A number of more digits has overflowed every type that a run has.
MOST_DIGITS = 40

# Reads every value as text, whatever its tag, and calls nothing. The parser in C is fast at any depth.
_Loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class UnreadableError(Exception):
    """A file cannot be used. The message is the reason, in one line without the file's name."""


class MissingError(UnreadableError):
    """There is no such file."""


def opened(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Raises UnreadableError, also for a pipe, for which it does not wait."""
    try:
        # Without O_NONBLOCK opening a pipe would wait until another program writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MissingError("no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise UnreadableError(f"it cannot be read ({getattr(error, 'strerror', error)})") from None
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind == stat.S_IFDIR:
            raise UnreadableError(f"it cannot be read ({os.strerror(errno.EISDIR)})")
        if kind != stat.S_IFREG:
            raise UnreadableError(f"it is {_KINDS.get(kind, 'something else')}, not a file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, largest: int = LARGEST_BYTES) -> bytes:
    """Reads a file whole. Raises UnreadableError, also if it has more than `largest` bytes."""
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            # Files of the system have no size beforehand.
            content = file.read(largest + 1) if size <= largest else b""
    except OSError as error:
        raise UnreadableError(f"it cannot be read ({error.strerror})") from None
    if size > largest or len(content) > largest:
        raise UnreadableError(f"it has more than {largest} bytes, too many for this file")
    return content


def read_lines(path: Path) -> Iterator[bytes]:
    r"""Yields the lines of a file of any size, each with its `\n`, which the last one may lack.

    A line of more than LONGEST_LINE bytes comes in pieces of that length. Raises UnreadableError.
    """
    try:
        with opened(path) as file:
            while line := file.readline(LONGEST_LINE):
                yield line
    except OSError as error:
        raise UnreadableError(f"it cannot be read ({error.strerror})") from None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file of one JSON object. Raises UnreadableError for anything else."""
    return json_object(read_bytes(path))


def json_object(text: bytes) -> dict[str, Any]:
    """Parses one JSON object. Raises UnreadableError for anything else, or with deeper nesting or longer numbers."""
    try:
        values = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise UnreadableError(TOO_DEEP) from None
    except ValueError:
        raise UnreadableError("it is not JSON") from None
    if not isinstance(values, dict):
        raise UnreadableError("it is not a JSON object")
    # Code that walks through the values, or prints them, may be recursive.
    level: list[Any] = [values]
    for _ in range(DEEPEST):
        nested = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        level = [child for children in nested for child in children]
        if not level:
            return values
    raise UnreadableError(TOO_DEEP)


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a file of one YAML mapping as `parse_yaml` does. Raises UnreadableError for anything else."""
    content = read_bytes(path, LARGEST_YAML_BYTES)
    try:
        return parse_yaml(content.decode())
    except UnicodeDecodeError:
        raise UnreadableError("it is not text in UTF-8") from None


def parse_yaml(text: str) -> dict[str, Any]:
    """Parses one YAML mapping into nested dicts and lists of texts; nothing is instantiated.

    Raises UnreadableError for anything else, or with deeper nesting or aliases.
    """
    try:
        _check_yaml(text)
        values = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # The parser of PyYAML 6.0.4 reads ahead, and has a limit of its own.
        if "maximum nesting depth" in str(error):
            raise UnreadableError(TOO_DEEP) from None
        raise UnreadableError("it is not a plain YAML file") from None
    if not isinstance(values, dict):
        raise UnreadableError("it is not a configuration")
    return values


def _check_yaml(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, _Loader):
        # Aliases of aliases could expand to an astronomical size.
        if isinstance(event, yaml.AliasEvent):
            raise UnreadableError("it has YAML aliases, which no configuration has")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise UnreadableError(TOO_DEEP)


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise UnreadableError(f"it has a number of {len(text)} digits")
    return int(text)
