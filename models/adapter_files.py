"""Adapters in peft's files: written and read tensor by tensor, from and to wherever they are.

A folder has `adapter_model.safetensors` and `adapter_config.json`, which `PeftModel.from_pretrained(base, folder)`
reads. An exported one of a model of diffusers also has `pytorch_lora_weights.safetensors`, for `load_lora_weights` of a
pipeline, `load_lora_adapter` of a model, and ComfyUI.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from models.adapters import NAME, adapter_layers, config_of, root_of
from models.expert_layout import for_each_expert, of_one_expert
from models.json_files import as_json, read_object
from models.lora_files import ONLY, check_only, folded, read_lora, scale_of, scaled, shared_name
from models.safetensors_files import DTYPES, StoredTensor, open_file, read_headers, read_into, write_tensors
from models.weights import check_fits, first_and_count, same_values
from models.whole_folder import Fill, Write, bytes_of

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
PREFIX = "base_model.model."
# The error for a file that peft has not written.
GIVE_OTHERS = "give a folder that peft has saved"
# As `ONLY`, of adapters in peft's files.
HERE = ONLY | {"rank_pattern": (None, {}), "alpha_pattern": (None, {})}


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the values of `adapter_parameters`, without autograd."""
    return {name: parameter.detach() for name, parameter in adapter_parameters(model).items()}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns all that trains in `model` under the names that it has in peft's files, in the model's order."""
    from peft import get_peft_model_state_dict

    root = root_of(model)
    trained = {name: parameter for name, parameter in root.named_parameters() if parameter.requires_grad}
    low_rank = get_peft_model_state_dict(root, state_dict=trained, adapter_name=NAME, save_embedding_layers=False)
    saved = config_of(model).modules_to_save or ()
    full = {
        f"{name}.{own}": parameter
        for name in saved
        for own, parameter in root.get_submodule(name).named_parameters(remove_duplicate=False)
    }
    return {f"{PREFIX}{name}": parameter for name, parameter in (low_rank | full).items()}


def adapter_fill(model: nn.Module) -> Fill:
    """Returns what fills peft's file of weights: with a matrix that experts share for each, made as it is written."""
    tensors, shapes = adapter_tensors(model), _stored_shapes(model)
    stored = {name: torch.empty(shape, dtype=tensors[name].dtype, device="meta") for name, shape in shapes.items()}

    def read(name: str) -> Tensor:
        return for_each_expert(tensors[name], shapes[name]) if name in shapes else tensors[name]

    return partial(write_tensors, tensors=tensors | stored, read=read)


def adapter_config(model: nn.Module, base: str | None = None, revision: str | None = None) -> bytes:
    """Returns the content of adapter_config.json.

    `base` is the name or folder of the base's weights, `revision` that of such a name on the Hub.
    """
    origin = {"base_model_name_or_path": base, "revision": revision}
    if hasattr(model, "vocab_size"):
        # Without it AutoPeftModelForCausalLM refuses the folder.
        origin["task_type"] = "CAUSAL_LM"
    values = as_json(config_of(model).to_dict()) | origin | {"inference_mode": True}
    return json.dumps(values, indent=2, default=str).encode()


def is_of_diffusers(model: nn.Module) -> bool:
    """Tells whether diffusers has a file of its own for the adapter of `model`."""
    return type(root_of(model)).__module__.startswith("diffusers.")


def shared_files(
    model: nn.Module, folder: Path, instead: Mapping[str, StoredTensor] = MappingProxyType({})
) -> dict[str, Fill]:
    """Returns what fills the files that other programs load an adapter from, made of peft's files in `folder`.

    `model` is one of diffusers and needs no values. In all files alpha is the rank, and the scale is in the matrices
    (`models.lora_files.folded`), because some programs read matrices and no alpha. `DIFFUSERS_FILE` has no
    `modules_to_save`, which diffusers does not know. `instead` is that of `adapter_values`.
    """
    root, config = root_of(model), read_object(folder / CONFIG_FILE, GIVE_OTHERS)
    scale = scale_of(config)

    def fill(write: Write, shared: bool) -> None:
        tensors = folded(adapter_values(folder, instead), scale)
        if shared:
            low_rank = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if ".lora_" in name}
            tensors = {shared_name(root, name): tensor for name, tensor in low_rank.items()}
        write_tensors(write, tensors)

    told = config | {"lora_alpha": config["r"], "use_rslora": False}
    return {
        CONFIG_FILE: bytes_of(json.dumps(told, indent=2).encode()),
        WEIGHTS_FILE: partial(fill, shared=False),
        DIFFUSERS_FILE: partial(fill, shared=True),
    }


def adapter_values(folder: Path, instead: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Reads the tensors of peft's file in `folder`; `instead` says where their values are, if they are elsewhere.

    A matrix that experts share may be there once, and is returned for each.
    """
    own = read_headers([folder / WEIGHTS_FILE])
    places = {**own, **instead}
    values = {name: torch.empty(places[name].shape, dtype=DTYPES[entry.dtype]) for name, entry in own.items()}
    read_into(values, places)
    return {
        name: value if value.shape == own[name].shape else for_each_expert(value, own[name].shape)
        for name, value in values.items()
    }


def load_adapter(model: nn.Module, path: str | Path) -> None:
    """Copies an adapter of files into that of `model`, converting to its dtype.

    Another alpha than that of `model` is made up for in the second matrices: exactly where the two scales differ by a
    power of two, else rounded in float32.

    Args:
        path: a folder that peft has saved; of a model of diffusers also a .safetensors file with a LoRA, as
            `models.lora_files` reads it, or a folder with one.

    Raises ValueError in one line if there is no adapter, or one of another shape or kind; nothing is changed then.
    """
    place = place_of(model, Path(path))
    if place.is_file():
        values = {f"{PREFIX}{name}": tensor for name, tensor in read_lora(model, place)[0].items()}
    else:
        factor = _check_config(model, place / CONFIG_FILE)
        load_adapter_tensors(model, place / WEIGHTS_FILE)
        second = [name for name in adapter_tensors(model) if factor != 1 and ".lora_B." in name]
        values = {name: scaled(value, factor) for name, value in _values(model, place / WEIGHTS_FILE, second)}
    targets = adapter_tensors(model)
    for name, tensor in values.items():
        targets[name].copy_(tensor)


def load_adapter_tensors(model: nn.Module, file: Path) -> None:
    """Copies the tensors of one file of peft's into `model`. Raises ValueError if they are not those of its adapter."""
    targets, stored = _fitting(model, file)
    shared = _stored_shapes(model)
    read_into({name: tensor for name, tensor in targets.items() if name not in shared}, stored)
    for name, value in _values(model, file, shared):
        targets[name].copy_(value)


def check_adapter(model: nn.Module, path: Path) -> list[str]:
    """Raises ValueError in one line if `path` has no adapter that can be read, or not one that fits `model`.

    Uses no value of `model`, which may be on the meta device. Returns the keys of text encoders in a file of several
    models, which are left out.
    """
    place = place_of(model, path)
    if place.is_file():
        return read_lora(model, place)[1]
    _check_config(model, place / CONFIG_FILE)
    _fitting(model, place / WEIGHTS_FILE)
    return []


def place_of(model: nn.Module, path: Path) -> Path:
    """Returns the folder of peft, or the file of a LoRA, that `path` is or has. Raises ValueError if it has neither."""
    if path.is_file():
        of_peft = path.name == WEIGHTS_FILE and (path.parent / CONFIG_FILE).exists()
        path = path.parent if of_peft else path
    elif not (path / CONFIG_FILE).exists() and (files := sorted(path.glob("*.safetensors"))):
        if len(files) > 1 and path / DIFFUSERS_FILE not in files:
            raise ValueError(f"{path} has {len(files)} .safetensors files and no {CONFIG_FILE}: give one, {files[0]}")
        path = files[0] if len(files) == 1 else path / DIFFUSERS_FILE
    if path.is_file() and not is_of_diffusers(model):
        raise ValueError(f"{path} is a file without {CONFIG_FILE}, and the model none of diffusers: {GIVE_OTHERS}")
    return path


def _fitting(model: nn.Module, file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the adapter's tensors in `model`, and where those of `file` are. Raises ValueError if they differ."""
    targets = adapter_tensors(model)
    stored = read_headers([file])
    if absent := [name for name in targets if name not in stored]:
        raise ValueError(f"{file} lacks tensor {first_and_count(absent)}, which this adapter has: choose its targets")
    if unknown := [name for name in stored if name not in targets]:
        raise ValueError(f"{file} has tensor {first_and_count(unknown)}, which this adapter lacks: choose its targets")
    shapes = _stored_shapes(model)
    for name, tensor in targets.items():
        check_fits(name, tensor.new_empty(shapes.get(name, tensor.shape), device="meta"), stored[name])
    # Reads them all, because one that differs would be lost.
    for _ in _values(model, file, shapes):
        pass
    first: dict[nn.Parameter, str] = {}
    for name, parameter in adapter_parameters(model).items():
        one = first.setdefault(parameter, name)
        if one != name and not same_values(stored, one, name):
            raise ValueError(
                f"{file}: {one} and {name} differ, but the model has one for both: train the adapter with peft's"
                " ensure_weight_tying=True"
            )
    return targets, stored


def _stored_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Returns of the tensors that experts share the shapes that they have in peft's files."""
    layers = [layer for _, layer in adapter_layers(model) if hasattr(layer, "stored_shapes")]
    shapes = {parameter: shape for layer in layers for parameter, shape in layer.stored_shapes.items()}
    return {name: shapes[parameter] for name, parameter in adapter_parameters(model).items() if parameter in shapes}


def _values(model: nn.Module, file: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors of peft's file as `model` has them. Raises ValueError where the experts do not share one."""
    targets, shared = adapter_tensors(model), _stored_shapes(model)
    with open_file(file) as stored:
        for name in names:
            value = stored.get_tensor(name)
            value = of_one_expert(value, targets[name].shape) if name in shared else value
            if value is None:
                raise ValueError(
                    f"{file}: {name} is another for each expert, and experts=shared has one for all: give"
                    " adapter.experts=true"
                )
            yield name, value


def _check_config(model: nn.Module, file: Path) -> float:
    """Returns the scale of a stored adapter over that of `model`. Raises ValueError for an adapter of another form."""
    from peft import LoraConfig

    # Where a file lacks a key, peft takes its default.
    stored, own = LoraConfig().to_dict() | read_object(file, GIVE_OTHERS), config_of(model).to_dict()
    if stored["r"] != own["r"]:
        raise ValueError(f"{file} has r={stored['r']}, and this adapter {own['r']}: give adapter.rank={stored['r']}")
    if stored["use_dora"] != own["use_dora"]:
        kind = "dora" if stored["use_dora"] else "lora"
        raise ValueError(f"{file} has use_dora={stored['use_dora']}, unlike this adapter: give adapter={kind}")
    if bool(stored["target_parameters"]) != bool(own["target_parameters"]):
        state = "adapters" if stored["target_parameters"] else "no adapters"
        raise ValueError(
            f"{file} has {state} of experts that are one tensor, unlike this adapter: give the same experts"
        )
    check_only(file, stored, HERE)
    return scale_of(stored) / scale_of(own)
