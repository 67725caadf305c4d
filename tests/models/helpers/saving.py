"""Writes a model's weights, as a checkpoint does or in the form of its library, for the tests that load them."""

from pathlib import Path

import torch
from torch import nn

from models.adapter_files import CONFIG_FILE, WEIGHTS_FILE, adapter_config, adapter_fill
from models.diffusion_files import diffusion_files
from models.hf_saving import hf_files
from models.safetensors_files import write_tensors
from models.weights import INDEX_FILE, MAX_SHARD_BYTES, weight_files
from models.whole_folder import write_whole_folder


def save_weights(model: nn.Module, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes the files that `weight_files` plans, and their index, to a new `folder`."""
    folder.mkdir(parents=True)
    files, index = weight_files(model, max_shard_bytes)
    for name, tensors in files.items():
        with open(folder / name, "wb") as file:
            write_tensors(file.write, tensors)
    if index is not None:
        (folder / INDEX_FILE).write_bytes(index)


@torch.no_grad()
def save_hf(model: nn.Module, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes config.json and the weights to `folder`, a new or empty one, for transformers' `from_pretrained`."""
    write_whole_folder(folder, hf_files(model, max_shard_bytes))


def save_diffusion(model: nn.Module, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes configuration and weights to `folder`, a new or empty one, for diffusers' `from_pretrained`."""
    write_whole_folder(folder, diffusion_files(model, max_shard_bytes))


def save_adapter(model: nn.Module, folder: Path, base: str | None = None) -> None:
    """Writes the files of the adapter of `model` to `folder`, as a checkpoint does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_bytes(adapter_config(model, base))
    with open(folder / WEIGHTS_FILE, "wb") as file:
        adapter_fill(model)(file.write)
