"""Chooses the layers of a model that get an adapter, and the modules that train in full beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from models.loss import Head
from models.quantise import is_conv1d

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# They read the weights of the layers inside them without calling these: an adapter there would have no effect.
READS_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
# As above, by the `model_type` of transformers: peft refuses the first two, and no kernel calls the third.
READ_IN_MAMBA = ("out_proj", "conv1d", "dt_proj")
READ_BY_TYPE = dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), READ_IN_MAMBA)
READ_BY_TYPE["jamba"] = ("dt_proj",)
# By class, the layers that it calls with the keyword `input`, which those of peft do not take.
CALLED_BY_KEYWORD = {"AnimateDiffTransformer3D": ("proj_in", "proj_out")}
# Layers beside experts that are one tensor: peft takes these names for the experts, which are no layers.
OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
# Names in a message.
NAMED = 12


def target_names(root: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Returns the names of the layers that get an adapter, in the order of the model.

    `patterns`: as in `matches`, over Linear and Conv layers. None stands for every linear layer inside a list of
    blocks: peft's "all-linear", without what comes before and after the blocks. Raises ValueError for a pattern without
    a match.
    """
    layers = dict(_layers(root))
    if "all-linear" in (patterns or ()):
        raise ValueError("targets=all-linear: is written null here, all linear layers of the blocks")
    if patterns is None:
        in_blocks = set(_names_in_lists(root))
        names = [name for name, layer in layers.items() if name in in_blocks and not isinstance(layer, CONVOLUTIONS)]
        if not names:
            raise ValueError(f"targets=null: the model has no linear layer in a list of blocks{_existing(layers)}")
        return names
    return _matched("targets", patterns, layers, layers)


def saved_names(root: nn.Module, patterns: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Returns the names of the modules that train in full; none of them lies inside another.

    Those that share a parameter with a chosen one are among them, so that a file has it under all its names. Raises
    ValueError for a pattern without a match, and for a module that is or holds one of `targets`.
    """
    modules = {name: module for name, module in root.named_modules() if name and _owns(module)}
    owners = {name: module for name, module in modules.items() if _owns(module, recurse=False)}
    names = _matched("modules_to_save", patterns, modules, owners)
    chosen = {parameter for name in names for parameter in modules[name].parameters()}
    names += [name for name, module in owners.items() if name not in names and chosen & {*module.parameters(False)}]
    outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    for name in outermost:
        for target in targets:
            if f"{target}.".startswith(f"{name}."):
                raise ValueError(
                    f"modules_to_save={name}: {target} gets an adapter, and cannot train in full as well: leave it out"
                    " of one of the two"
                )
    return outermost


def expert_names(root: nn.Module) -> list[str]:
    """Returns the names of the parameters that are the matrices of all experts of a layer, [experts, ...]."""
    return [
        f"{name}.{own}"
        for name, module in root.named_modules()
        if name.endswith("experts") or type(module).__name__.endswith("Experts")
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    ]


def linear_names(root: nn.Module) -> dict[str, str]:
    """Returns the names of what multiplies with a matrix, in the order of the model, each with its kind.

    Kinds are "layer", "router" (which chooses experts) and "experts" (those of a layer in one tensor). Embeddings are
    none, and neither are convolutions.
    """
    experts = {name.rpartition(".")[0] for name in expert_names(root)}
    kinds = {}
    for name, module in root.named_modules():
        weight = module._parameters.get("weight")
        if name in experts:
            kinds[name] = "experts"
        elif isinstance(module, nn.Linear | Head) or is_conv1d(module):
            kinds[name] = "layer"
        # A router of transformers is a module of its own with the matrix of a linear layer.
        elif weight is not None and weight.ndim == 2 and type(module).__name__.endswith(("Router", "Gate")):
            kinds[name] = "router"
    return kinds


def short_parameter_names(root: nn.Module, names: Sequence[str]) -> list[str]:
    """Returns the last two parts of `names`, if no other parameter of `root` ends in them; else `names`."""
    last = {".".join(name.split(".")[-2:]) for name in names}
    ending = {name for name, _ in root.named_parameters() if ".".join(name.split(".")[-2:]) in last}
    return sorted(last if ending == set(names) else names)


def matches(name: str, pattern: str) -> bool:
    """Tells whether a pattern with `*` and `?` matches the name of a module, or the end of it behind a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def short_names(root: nn.Module, names: Sequence[str]) -> list[str]:
    """Returns the last parts of `names`, if no other layer of `root` ends in one of them; else `names`.

    peft matches the ends of names too, and short ones are what people read.
    """
    last = sorted({name.rpartition(".")[2] for name in names})
    ending = {name for name, module in root.named_modules() if name.rpartition(".")[2] in last}
    return last if ending == set(names) else sorted(names)


def patterns_of(root: nn.Module, names: Sequence[str]) -> list[str]:
    """Returns few and short patterns that `target_names` has exactly the layers `names` for, with `*` for numbers."""
    others = [name for name, _ in _layers(root) if name not in set(names)]
    patterns: list[str] = []
    for name in names:
        if any(matches(name, pattern) for pattern in patterns):
            continue
        parts = re.sub(r"\b\d+\b", "*", name).split(".")
        ends = [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
        fitting = (end for end in ends if not any(matches(other, end) for other in others))
        patterns.append(next(fitting, name))
    return patterns


def _matched(key: str, patterns: Sequence[str], among: Mapping[str, nn.Module], shown: Mapping) -> list[str]:
    for pattern in patterns:
        if not any(matches(name, pattern) for name in among):
            raise ValueError(f"{key}={pattern}: matches no module{_existing(shown)}")
    if not patterns and key == "targets":
        raise ValueError(f"targets=[]: give patterns, or null for all linear layers of the blocks{_existing(shown)}")
    return [name for name in among if any(matches(name, pattern) for pattern in patterns)]


def _existing(modules: Mapping[str, nn.Module]) -> str:
    last = sorted({name.rpartition(".")[2] for name in modules})
    more = f" and {len(last) - NAMED} more" if len(last) > NAMED else ""
    return f"; the model has {', '.join(last[:NAMED])}{more}" if last else ""


def _owns(module: nn.Module, recurse: bool = True) -> bool:
    return next(module.parameters(recurse), None) is not None


def _layers(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the layers that an adapter has an effect on."""
    hidden = [name for name, module in root.named_modules() if isinstance(module, READS_INSIDE)]
    for name, module in root.named_modules():
        hidden += [f"{name}.{child}" for child in CALLED_BY_KEYWORD.get(type(module).__name__, ())]
    read = READ_BY_TYPE.get(getattr(getattr(root, "config", None), "model_type", None), ())
    left_out = (*read, *(OF_EXPERTS if expert_names(root) else ()))
    for name, module in root.named_modules():
        if not name or isinstance(module, Head) or any(f"{name}.".startswith(f"{parent}.") for parent in hidden):
            continue
        if name.rpartition(".")[2] in left_out:
            continue
        if isinstance(module, CONVOLUTIONS) or is_conv1d(module) or _is_linear(module):
            yield name, module


def _is_linear(module: nn.Module) -> bool:
    """Tells whether a module is a linear layer, and no router or grouped product that inherits from one."""
    if not isinstance(module, nn.Linear):
        return False
    if type(module).forward is nn.Linear.forward:
        return True
    try:
        with torch.no_grad():
            made = module(torch.zeros(1, 2, module.in_features, dtype=module.weight.dtype, device=module.weight.device))
    # Each class refuses rows that it does not expect in its own way.
    except Exception:
        return False
    return isinstance(made, torch.Tensor) and made.shape == (1, 2, module.out_features)


def _names_in_lists(root: nn.Module) -> Iterator[str]:
    for name, module in root.named_modules():
        if isinstance(module, nn.ModuleList):
            yield from (f"{name}.{inner}" if name else inner for inner, _ in module.named_modules() if inner)
