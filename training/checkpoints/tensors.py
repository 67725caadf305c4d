"""The tensors of a run by name: weights under Hugging Face's names, optimizer states under their parameter's.

Names and layout depend on the model alone, not on the offload mode or on the states' device.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from models.adapter_files import WEIGHTS_FILE as ADAPTER_FILE
from models.adapter_files import load_adapter_tensors
from models.adapters import is_adapted
from models.quantise import stored_tensors
from models.safetensors_files import DTYPE_NAMES, StoredTensor, read_headers, read_into
from models.weights import INDEX_FILE, SINGLE_FILE, checkpoint_files, load_weights
from training.runs.checkpoint_files import EMA_STEM, MANIFEST_FILE, OPTIMIZER_STEM, WEIGHTS_STEM
from training.runs.manifest import DamagedError

# A copy of a parameter, where its state is on another device.
COPY = "weight"


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the optimizer's states as PARAMETER.STATE, in the model's order. Copies of parameters are left out."""
    return {
        f"{name}.{key}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in sorted(optimizer.state.get(parameter, {}).items())
        if key != COPY
    }


def load_tensors(
    folder: Path,
    names: Iterable[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averages: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Copies a checkpoint into the model, the optimizer's states and `averages`, which exist already, on any device.

    Where a model has adapters, the checkpoint has only these, and the base has been filled before. `names` are the
    files of the checkpoint in `folder`; no other file is read. Raises DamagedError naming a file that is not among them
    or a tensor that does not fit, before anything is changed.
    """
    names = [name for name in names if name.endswith(".safetensors") or name == INDEX_FILE]
    states = optimizer_tensors(model, optimizer)
    try:
        stored = read_headers(folder / name for name in names if _has_stem(name, OPTIMIZER_STEM))
        _check(states, stored, folder)
        stored_averages = read_headers(folder / name for name in names if _has_stem(name, EMA_STEM))
        _check(averages, stored_averages, folder)
        if is_adapted(model):
            _refuse_unlisted({folder / ADAPTER_FILE}, folder, names)
            load_adapter_tensors(model, folder / ADAPTER_FILE)
        else:
            _load_weights(folder, names, model)
    except (ValueError, FileNotFoundError) as error:
        raise DamagedError(str(error)) from None
    read_into(states, stored)
    read_into(averages, stored_averages)
    renew_copies(model, optimizer)


def _load_weights(folder: Path, names: Iterable[str], model: nn.Module) -> None:
    weights = read_headers(folder / name for name in names if _has_stem(name, WEIGHTS_STEM) and name != INDEX_FILE)
    held = {}
    for name, tensor in model.state_dict().items():
        held |= stored_tensors(name, tensor)
    _check({name: tensor for name, tensor in held.items() if name in weights}, weights, folder)
    root = folder / (INDEX_FILE if INDEX_FILE in names else SINGLE_FILE)
    _refuse_unlisted({root, *checkpoint_files(root)}, folder, names)
    load_weights(model, root)


def _refuse_unlisted(files: set[Path], folder: Path, names: Iterable[str]) -> None:
    if unlisted := files - {folder / name for name in names}:
        raise ValueError(f"{folder / MANIFEST_FILE} lists no {min(unlisted).name}")


def _has_stem(name: str, stem: str) -> bool:
    return name.startswith((f"{stem}.", f"{stem}-"))


def _check(tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], folder: Path) -> None:
    """Raises ValueError unless the stored tensors have the same names, shapes and dtypes as `tensors`."""
    if absent := [name for name in tensors if name not in stored]:
        raise ValueError(f"{folder} lacks tensor {absent[0]}, which this run has")
    for name, entry in stored.items():
        if name not in tensors:
            raise ValueError(f"{entry.file} has tensor {name}, which this run lacks")
        tensor = tensors[name]
        found, wanted = (entry.dtype, entry.shape), (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        if found != wanted:
            raise ValueError(f"{entry.file}: tensor {name} is {_shown(*found)}, this run's is {_shown(*wanted)}")


def _shown(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


@torch.no_grad()
def renew_copies(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Copies parameters into the copies of them beside their states, where there are some."""
    for parameter in model.parameters():
        copy = optimizer.state.get(parameter, {}).get(COPY)
        if copy is not None:
            copy.copy_(parameter)
