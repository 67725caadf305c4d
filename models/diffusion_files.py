"""Weights of diffusion models in the files of diffusers: what `from_pretrained` reads and `save_pretrained` writes.

Tensors are copied one by one between file and parameter, as in `models.weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from models.safetensors_files import StoredTensor, split_into_files, write_tensors
from models.weights import MAX_SHARD_BYTES, index_of, load_weights, matched_weights
from models.whole_folder import Fill, bytes_of

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
            `unet`. Where a folder has several variants (".fp16."), the one without a name is taken.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: there are no safetensors files, or they do not fit the model, as in `models.weights.load_weights`.
            The model is unchanged then.
    """
    load_weights(model.network, _file_of(path))


def matched_diffusion(model: nn.Module, path: str | Path) -> tuple[dict[str, Tensor], dict[str, StoredTensor]]:
    """Returns what `models.weights.matched_weights` returns of the files that `load_diffusion` reads."""
    return matched_weights(model.network, _file_of(path))


def _file_of(path: str | Path) -> Path:
    path = Path(path).expanduser()
    return _files_in(path) if path.is_dir() else path


def diffusion_files(
    model: nn.Module, max_shard_bytes: int = MAX_SHARD_BYTES, read: Callable[[str], Tensor] | None = None
) -> dict[str, Fill]:
    """Returns the files of a saved model: what fills each, by name.

    Args:
        read: returns the values of a tensor, given its name in `model.network`; by default they are the model's own.

    Raises:
        ValueError: a tensor is on the meta device, and there is no `read`.
    """
    tensors = {name: tensor.detach() for name, tensor in model.network.state_dict(keep_vars=True).items()}
    for name, tensor in tensors.items():
        if tensor.is_meta and read is None:
            raise ValueError(f"{name} is on the meta device: allocate its memory before saving weights")
    parts = split_into_files(STEM, tensors, max_shard_bytes)
    files = {name: partial(write_tensors, tensors=part, read=read) for name, part in parts.items()}
    files[CONFIG_FILE] = bytes_of(model.network.to_json_string().encode())
    if len(parts) > 1:
        files[INDEX_FILE] = bytes_of(index_of(parts))
    return files


def _files_in(folder: Path) -> Path:
    """Returns what `load_weights` reads of a folder. Raises ValueError if there are no safetensors files in it."""
    found = config_folder(folder) or folder
    for name in (SINGLE_FILE, INDEX_FILE):
        if (found / name).is_file():
            return found / name
    raise ValueError(
        f"{found} has neither {SINGLE_FILE} nor {INDEX_FILE}: give the folder of a model of diffusers, with safetensors"
    )
