"""Reads safetensors files with the library, and writes them tensor by tensor without a second copy.

The library's own writer needs all tensors of a file on the host at once. Here host tensors are written from their own
memory, and device tensors through one small piece of host memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.quantise import values_of

if TYPE_CHECKING:
    from safetensors import safe_open

PIECE_BYTES = 64 * 2**20
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """The entry of one tensor in a file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def open_file(file: Path) -> safe_open:
    """Opens and maps a file.

    Raises ValueError if it is missing, cut short or not a safetensors file. The message is one line.
    """
    if file.exists() and not file.is_file():
        # The library would wait at a pipe without end.
        raise ValueError(f"{file} is not a file: download the checkpoint again")
    # Not at the top: composing imports the tasks, and these import this file.
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: download the checkpoint again") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} cannot be read as safetensors ({error}): it is cut short or has another format; "
            "download it again, or convert it to safetensors"
        ) from None


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Returns the header entries of several files by tensor name. It reads the headers only.

    Raises ValueError if a file cannot be read, or two files have a tensor of the same name.
    """
    stored: dict[str, StoredTensor] = {}
    for file in files:
        with open_file(file) as handle:
            for name in handle.keys():  # noqa: SIM118, the handle is not a dict
                if name in stored:
                    raise ValueError(f"{file} has tensor {name}, which {stored[name].file.name} has too: remove one")
                view = handle.get_slice(name)
                stored[name] = StoredTensor(file, tuple(view.get_shape()), view.get_dtype())
    return stored


def read_offsets(file: Path) -> dict[str, tuple[int, int]]:
    """Returns where the bytes of each tensor of a file begin, and where they end. Raises ValueError as `open_file`."""
    with open_file(file), file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(length))
    start = 8 + length
    entries = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: (start + begin, start + end) for name, (begin, end) in entries.items()}


@torch.no_grad()
def read_into(targets: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    """Copies stored tensors into targets of the same name and shape, converting to their dtype and device."""
    by_file: dict[Path, list[str]] = {}
    for name in targets:
        by_file.setdefault(stored[name].file, []).append(name)
    for file, names in by_file.items():
        with open_file(file) as handle:
            for name in names:
                with values_of(targets[name]) as values:
                    for rows, piece in tensor_pieces(handle, name):
                        values[rows].copy_(piece)


def tensor_pieces(handle: safe_open, name: str) -> Iterator[tuple[slice | EllipsisType, Tensor]]:
    """Yields a stored tensor as views of the mapped file, each with its rows in the tensor.

    A piece has at most 64 MiB, or one row. Converting it on a GPU needs no more scratch memory than that.
    """
    tensor = handle.get_tensor(name)
    if tensor.nbytes <= PIECE_BYTES:
        yield ..., tensor
        return
    rows = max(1, PIECE_BYTES * len(tensor) // tensor.nbytes)
    for start in range(0, len(tensor), rows):
        piece = slice(start, start + rows)
        yield piece, tensor[piece]


def write_tensors(
    write: Callable[[bytes | memoryview], object],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    read: Callable[[str], Tensor] | None = None,
) -> None:
    """Writes one file with `tensors`: it calls `write` with the file's bytes, from first to last.

    `metadata` are texts for the file's header. With `read`, `tensors` need no values: `read(name)` returns them when
    they are written, one tensor after another.

    Raises KeyError if the format lacks a tensor's dtype. Nothing has been written then.
    """
    # Tensors with larger elements come first, so that each begins at a multiple of its element size.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    # Hugging Face's loader requires this metadata.
    header: dict[str, dict] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write(len(text).to_bytes(8, "little"))
    write(text)
    for name in names:
        tensor = tensors[name] if read is None else read(name)
        for piece in tensor.detach().contiguous().view(-1).view(torch.uint8).split(PIECE_BYTES):
            write(memoryview(piece.cpu().numpy()))


def split_into_files(
    stem: str, items: Mapping[str, Any], max_bytes: int, nbytes: Callable[[Any], int] = attrgetter("nbytes")
) -> dict[str, dict[str, Any]]:
    """Divides items, in their order, between files of at most `max_bytes`; a larger one has a file of its own.

    Items are tensors, or anything else whose size `nbytes` tells.

    Returns the items by file name. One file is `STEM.safetensors`; several are `STEM-00001-of-00002.safetensors`, and
    so on.
    """
    parts: list[dict[str, Any]] = [{}]
    used = 0
    for name, item in items.items():
        if parts[-1] and used + nbytes(item) > max_bytes:
            parts.append({})
            used = 0
        parts[-1][name] = item
        used += nbytes(item)
    if len(parts) == 1:
        return {f"{stem}.safetensors": parts[0]}
    return {f"{stem}-{n:05d}-of-{len(parts):05d}.safetensors": part for n, part in enumerate(parts, start=1)}
