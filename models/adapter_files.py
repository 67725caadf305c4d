"""Adapters in peft's files: written and read tensor by tensor, from and to wherever they are.

A folder has `adapter_model.safetensors` and `adapter_config.json`, which `PeftModel.from_pretrained(base, folder)`
reads. An exported one of a model of diffusers also has `pytorch_lora_weights.safetensors`, for `load_lora_weights` of a
pipeline and `load_lora_adapter` of a model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from models.adapters import NAME, config_of, root_of
from models.json_files import as_json, read_object
from models.safetensors_files import open_file, read_headers, read_into, write_tensors
from models.weights import check_fits, first_and_count
from models.whole_folder import Fill, Write

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
# The key of the header in which diffusers looks for the configuration.
DIFFUSERS_METADATA = "lora_adapter_metadata"
PREFIX = "base_model.model."
# The error for a file that peft has not written.
GIVE_OTHERS = "give a folder that peft has saved"
# The keys of peft's configuration that change what the same tensors compute, with the knobs that set them.
SAME = {"r": "rank", "lora_alpha": "alpha", "use_dora": "dora", "use_rslora": "rslora"}
# Those that this program does not have, with the only values that it can load.
ONLY = {"peft_type": ("LORA",), "bias": ("none",), "rank_pattern": (None, {}), "alpha_pattern": (None, {})}
ONLY |= {"lora_bias": (None, False), "layer_replication": (None,), "trainable_token_indices": (None,)}


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
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
    return {f"{PREFIX}{name}": parameter.detach() for name, parameter in (low_rank | full).items()}


def adapter_config(model: nn.Module, base: str | None = None, revision: str | None = None) -> bytes:
    """Returns the content of adapter_config.json.

    `base` is the name or folder of the base's weights, `revision` that of such a name on the Hub.
    """
    origin = {"base_model_name_or_path": base, "revision": revision}
    values = as_json(config_of(model).to_dict()) | origin | {"inference_mode": True}
    return json.dumps(values, indent=2, default=str).encode()


def is_of_diffusers(model: nn.Module) -> bool:
    """Tells whether diffusers has a file of its own for the adapter of `model`."""
    return type(root_of(model)).__module__.startswith("diffusers.")


def diffusers_file(model: nn.Module, weights: Path) -> Fill:
    """Returns what fills DIFFUSERS_FILE from `weights`, peft's file of the adapter of `model`, a model of diffusers.

    It has no `modules_to_save`, which diffusers does not know. The model needs no values.
    """
    prefix = "unet" if "UNet" in type(root_of(model)).__name__ else "transformer"
    settings = {f"{prefix}.{key}": value for key, value in as_json(config_of(model).to_dict()).items()}
    # diffusers hands every other key to its own version of peft.
    settings = {key: value for key, value in settings.items() if not key.endswith(("peft_version", "peft_type"))}
    settings[f"{prefix}.modules_to_save"] = None
    metadata = {DIFFUSERS_METADATA: json.dumps(settings, sort_keys=True, default=str)}

    def fill(write: Write) -> None:
        with open_file(weights) as stored:
            low_rank = {name: stored.get_tensor(name) for name in stored.keys() if ".lora_" in name}  # noqa: SIM118
            renamed = {name.replace(PREFIX, f"{prefix}.", 1): tensor for name, tensor in low_rank.items()}
            write_tensors(write, renamed, metadata)

    return fill


def load_adapter(model: nn.Module, folder: str | Path) -> None:
    """Copies an adapter of peft's files into that of `model`, converting to its dtype.

    Raises ValueError in one line if the folder has no adapter, or one of another shape or scale; nothing is changed
    then.
    """
    folder = Path(folder)
    _check_config(model, folder / CONFIG_FILE)
    load_adapter_tensors(model, folder / WEIGHTS_FILE)


def load_adapter_tensors(model: nn.Module, file: Path) -> None:
    """Copies the tensors of one file of peft's into `model`. Raises ValueError if they are not those of its adapter."""
    read_into(*_fitting(model, file))


def check_folder(model: nn.Module, folder: Path) -> None:
    """Raises ValueError in one line if `folder` has no adapter that can be read, or not one that fits `model`.

    Reads headers alone, and no value of `model`, which may be on the meta device.
    """
    _check_config(model, folder / CONFIG_FILE)
    _fitting(model, folder / WEIGHTS_FILE)


def _fitting(model: nn.Module, file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the adapter's tensors in `model`, and where those of `file` are. Raises ValueError if they differ."""
    targets = adapter_tensors(model)
    stored = read_headers([file])
    if absent := [name for name in targets if name not in stored]:
        raise ValueError(f"{file} lacks tensor {first_and_count(absent)}, which this adapter has: choose its targets")
    if unknown := [name for name in stored if name not in targets]:
        raise ValueError(f"{file} has tensor {first_and_count(unknown)}, which this adapter lacks: choose its targets")
    for name, tensor in targets.items():
        check_fits(name, tensor, stored[name])
    return targets, stored


def _check_config(model: nn.Module, file: Path) -> None:
    stored, own = read_object(file, GIVE_OTHERS), config_of(model).to_dict()
    for key, knob in SAME.items():
        if stored.get(key, own[key] if key in ("r", "lora_alpha") else False) != own[key]:
            raise ValueError(f"{file} has {key}={stored[key]}, and this adapter {own[key]}: give the same {knob}")
    if bool(stored.get("target_parameters")) != bool(own["target_parameters"]):
        state = "adapters" if stored.get("target_parameters") else "no adapters"
        raise ValueError(
            f"{file} has {state} of experts that are one tensor, unlike this adapter: give the same experts"
        )
    for key, values in ONLY.items():
        if key in stored and stored[key] not in values:
            raise ValueError(f"{file} has {key}={stored[key]}, which cannot be loaded here")
