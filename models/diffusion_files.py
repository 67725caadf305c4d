"""Weights of diffusion models in the files of diffusers: what `from_pretrained` reads and `save_pretrained` writes.

Tensors are copied one by one between file and parameter, as in `models.weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from models.safetensors_files import split_into_files, write_tensors
from models.weights import MAX_SHARD_BYTES, index_of
from models.whole_folder import Fill, bytes_of

CONFIG_FILE = "config.json"
# The configuration of a scheduler in its folder, and that of a whole pipeline.
SCHEDULER_FILE = "scheduler_config.json"
PIPELINE_FILE = "model_index.json"
STEM = "diffusion_pytorch_model"
SINGLE_FILE = f"{STEM}.safetensors"
INDEX_FILE = f"{SINGLE_FILE}.index.json"


def config_folder(path: Path) -> Path | None:
    """Returns the folder of the model: `path`, or in the folder of a pipeline `transformer` or `unet`. None: none."""
    folders = (path, path / "transformer", path / "unet")
    return next((folder for folder in folders if (folder / CONFIG_FILE).is_file()), None)


def scheduler_file(path: Path) -> Path | None:
    """Returns the configuration of the scheduler of `path`: that file itself, or of a folder the file in it.

    Of a pipeline's folder it is the one in its folder `scheduler`, and so it is of one of its models, or of their
    files. None: there is none.
    """
    path = path.absolute()
    if path.name == SCHEDULER_FILE and path.is_file():
        return path
    folder = path if path.is_dir() else path.parent
    places = [folder, folder / "scheduler"]
    if (folder / CONFIG_FILE).is_file():
        places.append(folder.parent / "scheduler")
    return next((place / SCHEDULER_FILE for place in places if (place / SCHEDULER_FILE).is_file()), None)


def pipeline_of(scheduler: Path) -> Path | None:
    """Returns the model_index.json of the pipeline to which the file of a scheduler belongs. None: there is none."""
    places = [folder / PIPELINE_FILE for folder in scheduler.parents[:2]]
    return next((file for file in places if file.is_file()), None)


def file_of(path: str | Path) -> Path:
    """Returns what `load_weights` reads of `path`: itself, or of a folder its file or index.

    Where a folder has several variants (".fp16."), the one without a name is taken. Raises ValueError for a folder
    without safetensors files.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        return path
    found = config_folder(path) or path
    for name in (SINGLE_FILE, INDEX_FILE):
        if (found / name).is_file():
            return found / name
    raise ValueError(
        f"{found} has neither {SINGLE_FILE} nor {INDEX_FILE}: give the folder of a model of diffusers, with safetensors"
    )


def diffusion_files(
    model: nn.Module, max_shard_bytes: int = MAX_SHARD_BYTES, read: Callable[[str], Tensor] | None = None
) -> dict[str, Fill]:
    """Returns the files of a saved model: what fills each, by name.

    Args:
        read: returns the values of a tensor, given its name in `model.network`; by default they are the model's own.

    Raises ValueError if a tensor is on the meta device, and there is no `read`.
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
