"""Messages between ranks: any Python object as bytes, the configuration with the types of its options too."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from training.config.schema import SCHEMAS


class _Pickler(pickle.Pickler):
    """The dataclasses of options are made at import, so pickle does not find them: they go as (group, option)."""

    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        return _NAMES.get(obj) if isinstance(obj, type) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, str]) -> type:
        group, option = pid
        return SCHEMAS[group][option]


_NAMES = {schema: (group, option) for group, options in SCHEMAS.items() for option, schema in options.items()}


def to_bytes(message: Any) -> bytes:
    """Returns `message` as bytes. A tensor that is a view takes along the whole memory under it: clone it before."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(message)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Returns the message that `to_bytes` made into `data`. Both are processes of one run of one user."""
    return _Unpickler(io.BytesIO(data)).load()


def encoded(message: Any) -> tuple[Tensor, Tensor]:
    """Returns the length of a message, int64 [1], and its bytes (uint8)."""
    data = torch.frombuffer(bytearray(to_bytes(message)), dtype=torch.uint8)
    return torch.tensor([len(data)]), data
