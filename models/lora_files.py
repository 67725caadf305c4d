"""LoRA files as people share them: one .safetensors file for a model of diffusers, written and read.

The scale of such a file, alpha / rank, is in its matrices, in tensors named alpha, or in the header, and programs take
different ones for granted where there is none. A file written here has it in the matrices, so that alpha is the rank,
which diffusers, ComfyUI and kohya's scripts take then. The names of a UNet are diffusers' older ones
(`processor.to_q.lora.up`), because ComfyUI reads no others of diffusers.

Keys of other programs are read by diffusers' own conversions.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from models.adapter_targets import NAMED, patterns_of
from models.adapters import NAME, adapter_layers, config_of, root_of, without_adapters
from models.quiet_imports import import_quantisers, without_remarks
from models.safetensors_files import open_file
from models.weights import first_and_count

if TYPE_CHECKING:
    from peft import LoraConfig

# The key of the header in which diffusers keeps peft's configuration.
METADATA = "lora_adapter_metadata"
# The keys of peft's configuration that this program does not have, with the only values that it can load.
ONLY = {"peft_type": ("LORA",), "bias": ("none",), "lora_bias": (None, False), "layer_replication": (None,)}
ONLY |= {"trainable_token_indices": (None,), "use_qalora": (False,), "alora_invocation_tokens": (None,)}
ONLY |= {"arrow_config": (None,), "use_bdlora": (None,)}
# With others, such as pissa, peft changes the base too when it loads the file.
ONLY |= {"init_lora_weights": (True, False, "gaussian", "orthogonal", "eva")}
# The keys of text encoders, in diffusers' form and in kohya's, begin with one of these.
TEXT = ("text_encoder", "lora_te")
# What a converted key says: a layer, and a part of its adapter.
KEY = re.compile(
    r"(?P<layer>.+)\.(?:lora_(?P<matrix>[AB])\.weight|(?P<other>lora_magnitude_vector|alpha)(?:\.weight)?)"
)
# The parts of the adapter of each layer, by the names in KEY.
Layers = dict[str, dict[str, Tensor]]


def scale_of(config: Mapping[str, Any]) -> float:
    """Returns by what the product of the two matrices is multiplied, from values of peft's configuration."""
    rank = config["r"]
    return config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)


def scaled(matrix: Tensor, factor: float) -> Tensor:
    """Returns `matrix` times `factor`: bf16 by a power of two stays bf16, and is exact; all else is float32."""
    exact = matrix.dtype == torch.bfloat16 and math.frexp(factor)[0] == 0.5
    return matrix * factor if exact else matrix.float() * factor


def folded(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Returns the tensors of an adapter, by peft's names, with the scale in its second matrices: that of B is 1.

    All of its matrices are float32 where one in fewer bits would be rounded: peft's layers need one dtype.
    """
    values = {name: scaled(tensor, scale) if ".lora_B." in name else tensor for name, tensor in tensors.items()}
    if all(values[name].dtype == tensor.dtype for name, tensor in tensors.items()):
        return values
    return {name: tensor.float() if ".lora_" in name else tensor for name, tensor in values.items()}


def prefix_of(root: nn.Module) -> str:
    """Returns the name of a model of diffusers in its pipelines, with which the keys of their LoRA files begin."""
    return "unet" if "UNet" in type(root).__name__ else "transformer"


def shared_name(root: nn.Module, name: str) -> str:
    """Returns the key that diffusers and ComfyUI read for a tensor that peft names `name`.

    ComfyUI has no key for the magnitudes of DoRA.
    """
    prefix = prefix_of(root)
    layer, _, matrix = name.partition(".lora_")
    way = {"A.weight": "lora.down.weight", "B.weight": "lora.up.weight"}.get(matrix)
    if prefix != "unet" or way is None:
        return f"{prefix}.{name}"
    layer = layer.replace(".to_", ".processor.to_")
    return f"{prefix}.{layer[:-2]}_{way}" if layer.endswith(".to_out.0") else f"{prefix}.{layer}.{way}"


def read_lora(model: nn.Module, file: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Reads a LoRA file for the adapter of `model`, a model of diffusers, which may be on the meta device.

    Returns the tensors by the names of peft's files without their prefix, scaled so that the adapter with its own alpha
    computes what diffusers does with the file; and the keys of text encoders, which are left out. A factor that is no
    power of two rounds the second matrices in float32.

    Raises ValueError in one line for a file that cannot be read or does not fit the adapter.
    """
    root, own = root_of(model), config_of(model)
    with open_file(file) as handle:
        keys = list(handle.keys())
        state = {key: handle.get_tensor(key) for key in keys if not key.startswith(TEXT)}
        header = (handle.metadata() or {}).get(METADATA)
    found = _by_layer(root, file, state)
    _check_layers(root, file, found)
    _check_parts(root, file, found)
    config = None if header is None else _config(root, file, header)
    values = {}
    for layer, parts in found.items():
        alpha = parts.get("alpha")
        if alpha is not None and config is not None:
            raise ValueError(f"{file} has an alpha of {layer} and a {METADATA}: remove one of the two")
        stored = {"r": own.r, "lora_alpha": own.r if alpha is None else alpha.item()}
        if config is not None:
            stored |= {"lora_alpha": _alpha(config, layer), "use_rslora": config.use_rslora}
        values[f"{layer}.lora_A.weight"] = parts["A"]
        values[f"{layer}.lora_B.weight"] = scaled(parts["B"], scale_of(stored) / scale_of(own.to_dict()))
        if own.use_dora:
            values[f"{layer}.lora_magnitude_vector"] = parts["lora_magnitude_vector"]
    return values, [key for key in keys if key.startswith(TEXT)]


def _by_layer(root: nn.Module, file: Path, state: dict[str, Tensor]) -> Layers:
    """Returns the parts of the adapter of each layer. Raises ValueError for keys that name none."""
    if key := next((key for key in state if "dora_scale" in key), None):
        raise ValueError(f"{file} has {key}: diffusers reads no DoRA in this form: give another file")
    found, unknown = _parsed(root, state)
    if unknown:
        found, unknown = _parsed(root, _converted(root, file, state))
    if unknown:
        raise ValueError(
            f"{file} has {first_and_count(unknown)}, which fits nothing in a {type(root).__name__}: give a LoRA for"
            " this model"
        )
    if not found:
        raise ValueError(f"{file} has no adapter of a {type(root).__name__}: give a LoRA for this model")
    return found


def _parsed(root: nn.Module, state: Mapping[str, Tensor]) -> tuple[Layers, list[str]]:
    """Returns the parts of the adapter of each layer, and the keys that have another form or name no layer."""
    from diffusers.utils import convert_unet_state_dict_to_peft

    names = {name for name, _ in root.named_modules()}
    found: Layers = {}
    unknown = []
    for key, tensor in state.items():
        (name,) = convert_unet_state_dict_to_peft({key.removeprefix(f"{prefix_of(root)}."): tensor})
        # Conversions of kohya's keys may name an alpha after a matrix.
        name = name.replace(".lora_A.weight.alpha", ".alpha")
        match = KEY.fullmatch(name)
        if match is None or match["layer"] not in names:
            unknown.append(key)
        else:
            found.setdefault(match["layer"], {})[match["matrix"] or match["other"]] = tensor
    return found, unknown


def _converted(root: nn.Module, file: Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns what the pipeline of the model makes of the keys of other programs, with alphas among the tensors.

    diffusers takes alphas by patterns, which miss those of the attention of UNets; so they go by layer here. Some
    conversions drop keys with no more than a remark (`diff_b` of Flux); autograd tells which tensors are in the result.
    Raises ValueError for keys that are dropped, or cannot be converted.
    """
    kind = type(root).__name__
    matrices = {key: tensor for key, tensor in state.items() if tensor.is_floating_point() and "alpha" not in key}
    with without_remarks(), torch.enable_grad():
        loader = _loader(root)
        if loader is None:
            return state
        for tensor in matrices.values():
            tensor.requires_grad_()
        try:
            # Copies, because conversions change tensors in place.
            made = loader.lora_state_dict(
                {key: tensor.clone() for key, tensor in state.items()},
                return_lora_metadata=True,
                return_alphas=True,
                unet_config=root.config,
            )
        # The conversions raise errors of any type where the keys are not what they expect.
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"{file} has {first_and_count(list(state))}, which diffusers cannot convert for a {kind} ({reason}):"
                " give a LoRA for this model"
            ) from error
        found = [tensor.float().sum() for tensor in made[0].values() if tensor.requires_grad]
        total = sum(found, torch.zeros((), requires_grad=True))
        reached = torch.autograd.grad(total, [*matrices.values()], allow_unused=True)
    pairs = zip(matrices.items(), reached, strict=True)
    dropped = [key for (key, tensor), gradient in pairs if gradient is None and tensor.any()]
    if dropped:
        raise ValueError(
            f"{file} has {first_and_count(dropped)}, which diffusers leaves out of a {kind}: give a file without"
        )
    alphas = made[1] if len(made) == 3 and made[1] else {}
    return {key: torch.as_tensor(value).detach() for key, value in (made[0] | alphas).items()}


def _loader(root: nn.Module) -> Any:
    """Returns the first pipeline of diffusers that loads LoRA files into models of the class of `root`; None: none."""
    import_quantisers()
    import diffusers
    from diffusers.loaders.lora_base import LoraBaseMixin

    folder = Path(diffusers.__file__).parent
    kind = type(root).__name__
    for file in sorted(folder.glob("pipelines/*/pipeline_*.py")):
        text = file.read_text(encoding="utf-8")
        if "LoraLoaderMixin" not in text or not re.search(rf": [\w |]*\b{kind}\b", text):
            continue
        module = importlib.import_module(".".join(("diffusers", *file.relative_to(folder).with_suffix("").parts)))
        for made in vars(module).values():
            if isinstance(made, type) and issubclass(made, LoraBaseMixin) and made.__module__ == module.__name__:
                return made
    return None


def _check_layers(root: nn.Module, file: Path, found: Layers) -> None:
    """Raises ValueError if the layers of the file are not those of the adapter, with the targets to give."""
    own = [name for name, _ in adapter_layers(root)]
    lacking, more = [name for name in own if name not in found], [name for name in found if name not in own]
    if saved := config_of(root).modules_to_save:
        raise ValueError(f"{file} has no {saved[0]}, which trains in full here: give adapter.modules_to_save=null")
    if not lacking and not more:
        return
    with without_adapters(root):
        patterns = patterns_of(root, list(found))
    advice = f"give adapter.targets=[{','.join(patterns)}]" if len(patterns) <= NAMED else "choose its targets"
    which = f"has {first_and_count(more)}, where" if more else f"lacks {first_and_count(lacking)}, where"
    raise ValueError(f"{file} {which} this adapter has {'nothing' if more else 'a part'}: {advice}")


def _check_parts(root: nn.Module, file: Path, found: Layers) -> None:
    """Raises ValueError if an adapter of the file has another rank, kind or shape than that of its layer."""
    own, layers = config_of(root), list(adapter_layers(root))
    names = ["A", "B", *(["lora_magnitude_vector"] if own.use_dora else [])]
    for name, _ in layers:
        if not own.use_dora and "lora_magnitude_vector" in found[name]:
            raise ValueError(f"{file} has {name}.lora_magnitude_vector, which is DoRA's: give adapter=dora")
        if lacking := [part for part in names if part not in found[name]]:
            advice = "give a whole file" if lacking[0] in "AB" else "give adapter=lora"
            raise ValueError(f"{file} lacks {lacking[0]} of {name}: {advice}")
    ranks = {(*found[name]["A"].shape, 0)[0]: name for name, _ in layers}
    if len(ranks) > 1:
        several = " and ".join(f"{rank} at {layer}" for rank, layer in sorted(ranks.items()))
        raise ValueError(f"{file} has rank {several}, and an adapter has one here: give another file")
    if own.r not in ranks:
        rank, name = ranks.popitem()
        raise ValueError(f"{file} has rank {rank} at {name}, and this adapter {own.r}: give adapter.rank={rank}")
    for name, layer in layers:
        for part, weights in zip(names, (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector), strict=False):
            shape, expected = found[name][part].shape, weights[NAME].weight.shape
            if shape != expected:
                raise ValueError(
                    f"{file}: {part} of {name} has shape {tuple(shape)}, and the model's layer takes {tuple(expected)}:"
                    " give a LoRA for this model"
                )


def _config(root: nn.Module, file: Path, header: str) -> LoraConfig:
    """Returns peft's configuration in the header of a file, whose keys may begin with the model's name."""
    from peft import LoraConfig

    prefix = f"{prefix_of(root)}."
    try:
        values = {key: value for key, value in json.loads(header).items() if not key.startswith(TEXT)}
        config = LoraConfig(**{key.removeprefix(prefix): value for key, value in values.items()})
    except (TypeError, ValueError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{file} has a {METADATA} that peft does not take ({reason}): give another file") from error
    check_only(file, config.to_dict(), ONLY)
    return config


def check_only(file: Path, config: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ValueError if a value of peft's configuration is not among those of its key in `only`."""
    for key, values in only.items():
        if config[key] not in values:
            raise ValueError(f"{file} has {key}={config[key]}, which cannot be loaded here")


def _alpha(config: LoraConfig, layer: str) -> float:
    """Returns the alpha that peft gives a layer."""
    from peft.utils.other import get_pattern_key

    return config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, layer), config.lora_alpha)
