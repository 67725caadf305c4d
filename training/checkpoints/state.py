"""The state of a run: its step, the random generators, and its tensors by name.

Weights have Hugging Face's names; an optimizer state has the name of its parameter and its own. Names and layout depend
on the model alone, not on the offload mode or on the device of the states.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from models.adapter_files import WEIGHTS_FILE as ADAPTER_FILE
from models.adapter_files import load_adapter_tensors
from models.adapters import is_adapted
from models.quantise import stored_tensors
from models.safetensors_files import DTYPE_NAMES, StoredTensor, open_file, read_headers, read_into
from models.weights import INDEX_FILE, SINGLE_FILE, checkpoint_files, load_weights
from training.runs.bounded_files import DamagedError, read_json
from training.runs.checkpoint_files import (
    EMA_STEM,
    MANIFEST_FILE,
    OPTIMIZER_STEM,
    RANDOM_FILE,
    STATE_FILE,
    WEIGHTS_STEM,
)

# The name of an optimizer's state that is a copy of its parameter, kept where the states are on another device.
COPY = "weight"


@dataclass(frozen=True)
class RunState:
    """The progress of a run; learning rate and batches follow from `step`. The defaults are those of a new run."""

    step: int = 0
    """optimizer steps done"""
    skipped_steps: int = 0
    """those among them that were skipped because gradients were not finite"""
    batch_sha256: str | None = None
    """of the last step's batch, which a dataset that has changed does not give again"""
    data_sha256: str | None = None
    """of all tokens, if the dataset has them in memory: it shows every change of the text"""
    tracking_id: str | None = None
    """the id of the run in wandb"""
    eval_sha256: str | None = None
    """of the held-out batches, if the run evaluates"""
    source_sha256: str | None = None
    """of the config.json from which the model is made, if it is (`training.weights.source.source_digest`)"""
    task_sha256: str | None = None
    """of the files of the model that the task follows (`Task.files`)"""
    units: int = 0
    """tokens, images or examples trained on, without padding"""

    def to_json(self) -> bytes:
        """Returns the content of a checkpoint's state.json."""
        return json.dumps(asdict(self), indent=2).encode()


def read_state(folder: Path) -> RunState:
    """Reads the state of the checkpoint in `folder`. Raises DamagedError if the file does not have a valid one."""
    path = folder / STATE_FILE
    values = read_json(path)
    counts = dict.fromkeys(("step", "skipped_steps", "units"), lambda value: type(value) is int and value >= 0)
    checks = counts | {
        "batch_sha256": lambda value: isinstance(value, str),
        # It becomes part of a folder's name, so it may not lead elsewhere.
        "tracking_id": lambda value: value is None or re.fullmatch(r"[A-Za-z0-9_-]{1,64}", str(value)),
    }
    names = [field.name for field in fields(RunState)]
    for name in names:
        is_valid = checks.get(name, lambda value: value is None or isinstance(value, str))
        if name not in values or not is_valid(values[name]):
            raise DamagedError(f"{path} has no valid {name}: {values.get(name)!r:.80}")
    return RunState(**{name: values[name] for name in names})


def digest_of_all(dataset) -> str | None:
    """Returns the SHA-256 of all data of `dataset`, None if it does not have them in memory."""
    return getattr(dataset, "data_sha256", None)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of torch's random generators of the host ("cpu") and of a GPU ("cuda"), each uint8 [bytes]."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(folder: Path, device: torch.device) -> None:
    """Restores torch's random generators, the GPU's if both runs have a GPU. Raises DamagedError for a bad file."""
    path = folder / RANDOM_FILE
    try:
        with open_file(path) as handle:
            states = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118, the handle is no dict
        torch.set_rng_state(states["cpu"])
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise DamagedError(f"{path} does not have the states of torch's random generators ({error})") from None


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the optimizer's states by PARAMETER.STATE, in the parameters' order, without copies of parameters."""
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

    The checkpoint of a model with adapters has the adapters alone. `names` are the files that the manifest of `folder`
    lists; no other file is read. Raises DamagedError for a file that is not listed, or a tensor that does not fit,
    before a tensor changes.
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
    """Copies each parameter into the copy of it that the optimizer keeps beside its states, if it keeps one."""
    for parameter in model.parameters():
        copy = optimizer.state.get(parameter, {}).get(COPY)
        if copy is not None:
            copy.copy_(parameter)
