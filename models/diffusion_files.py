"""Weights of diffusion models in the files of diffusers: what `from_pretrained` reads and `save_pretrained` writes.

Tensors are copied one by one between file and parameter, as in `models.weights`.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor, nn

from models.safetensors_files import split_into_files, write_tensors
from models.weights import MAX_SHARD_BYTES, load_weights

CONFIG_FILE = "config.json"
STEM = "diffusion_pytorch_model"
SINGLE_FILE = f"{STEM}.safetensors"
INDEX_FILE = f"{SINGLE_FILE}.index.json"


def config_folder(path: Path) -> Path | None:
    """Returns the folder of the model: `path`, or in the folder of a pipeline `transformer` or `unet`. None: none."""
    folders = (path, path / "transformer", path / "unet")
    return next((folder for folder in folders if (folder / CONFIG_FILE).is_file()), None)


def load_diffusion(model: nn.Module, path: str | Path) -> None:
    """Copies weights into the model's parameters and persistent buffers, converting to their dtype and device.

    Args:
        path: a .safetensors file, an index, the folder of a model, or that of a pipeline with one in `transformer` or
            `unet`. Of several variants in a folder (".fp16.") the one without a name is taken.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: there are no safetensors files, or they do not fit the model, as in `models.weights.load_weights`.
            The model is unchanged then.
    """
    path = Path(path).expanduser()
    load_weights(model.network, _files_in(path) if path.is_dir() else path)


def diffusion_files(
    model: nn.Module, max_shard_bytes: int = MAX_SHARD_BYTES
) -> tuple[dict[str, dict[str, Tensor]], dict[str, bytes]]:
    """Returns the files of a saved model by name: those of safetensors with their tensors, and all others as bytes.

    Raises:
        ValueError: a tensor is on the meta device.
    """
    tensors = {}
    for name, tensor in model.network.state_dict(keep_vars=True).items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: allocate its memory before saving weights")
        tensors[name] = tensor.detach()
    files = split_into_files(STEM, tensors, max_shard_bytes)
    others = {CONFIG_FILE: model.network.to_json_string().encode()}
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {name: file for file, held in files.items() for name in held},
        }
        others[INDEX_FILE] = json.dumps(index, indent=2).encode()
    return files, others


def save_diffusion(model: nn.Module, folder: str | Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes configuration and weights to `folder`, a new or empty one, for diffusers' `from_pretrained`.

    Raises:
        ValueError: the folder has files, or a tensor is on the meta device. Nothing has been written then.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give a new folder")
    files, others = diffusion_files(model, max_shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        with open(folder / name, "wb") as file:
            write_tensors(file.write, tensors)
    for name, content in others.items():
        (folder / name).write_bytes(content)


def _files_in(folder: Path) -> Path:
    """Returns what `load_weights` reads of a folder. Raises ValueError if there are no safetensors files in it."""
    found = config_folder(folder) or folder
    for name in (SINGLE_FILE, INDEX_FILE):
        if (found / name).is_file():
            return found / name
    raise ValueError(
        f"{found} has neither {SINGLE_FILE} nor {INDEX_FILE}: give the folder of a model of diffusers, with safetensors"
    )
