"""Writes a model's weights as a checkpoint does, for the tests that load them."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from models.safetensors_files import write_tensors
from models.weights import INDEX_FILE, MAX_SHARD_BYTES, weight_files


def save_weights(model: nn.Module, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes the files that `weight_files` plans, and their index, to a new `folder`."""
    folder.mkdir(parents=True)
    files, index = weight_files(model, max_shard_bytes)
    for name, tensors in files.items():
        with open(folder / name, "wb") as file:
            write_tensors(file.write, tensors)
    if index is not None:
        (folder / INDEX_FILE).write_bytes(index)
