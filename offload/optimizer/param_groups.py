"""The parameter groups of AdamW: checks them, splits off those that do not decay, and reads their hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.errors import KnobError
from offload.knobs import in_range
from offload.optimizer.kernels import HyperParameters

# Keys of torch's AdamW that change the arithmetic, and the one value of each that the update here computes.
COMPUTED = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_hyperparameters(lr: float, betas: Sequence[float], eps: float, weight_decay: float) -> None:
    """Raises KnobError for a value out of range."""
    in_range("lr", lr, at_least=0)
    # Less is 0 in float32, in which updates are computed: 0 / 0 where a gradient is 0.
    in_range("eps", eps, at_least=1e-45)
    in_range("weight_decay", weight_decay, at_least=0)
    if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        raise KnobError("betas", list(betas), "must be two numbers, at least 0 and below 1")


def check_group(group: dict[str, Any]) -> None:
    """Raises ValueError where a setting, or the dtype of a parameter that trains, is not supported.

    A setting out of range is a KnobError.
    """
    check_settings(group, "a parameter group")
    betas = [float(beta) for beta in group["betas"]]
    check_hyperparameters(float(group["lr"]), betas, float(group["eps"]), float(group["weight_decay"]))
    for parameter in group["params"]:
        if parameter.requires_grad:
            check_dtype(parameter)


def check_dtype(parameter: Tensor) -> None:
    """Raises ValueError for a parameter whose dtype is not supported."""
    if parameter.dtype not in DTYPES:
        raise ValueError(f"a parameter is {parameter.dtype}: AdamW here takes float32, bfloat16 and float16")


def check_settings(group: dict[str, Any], what: str) -> None:
    """Raises ValueError where a key of `group`, which the message calls `what`, asks for another arithmetic."""
    for key, value in COMPUTED.items():
        if bool(group.get(key, value)) != value:
            raise ValueError(f"{what} has {key}={not value}, which is not supported: only {key}={value} is")


def hyperparameters_of(group: dict[str, Any]) -> HyperParameters:
    """Returns the hyper-parameters of a group as they are now. Raises ValueError for one that is not supported."""
    check_settings(group, "a parameter group")
    return HyperParameters(
        float(group["lr"]), *map(float, group["betas"]), float(group["eps"]), float(group["weight_decay"])
    )


def decay_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns groups of `params` (parameters or groups of them) in which biases and weights of norms do not decay.

    Those are the parameters of fewer than two dimensions; embeddings decay. Each group with both kinds becomes two, the
    first with its own weight decay, the second with none. Raises TypeError for a set of parameters, as torch does. What
    is no tensor stays in the first, for torch to refuse.
    """
    entries = list(params)
    if entries and not isinstance(entries[0], dict):
        entries = [{"params": entries}]
    groups = []
    for group in entries:
        members = group["params"]
        if isinstance(members, set):
            raise TypeError("parameters come in a set, whose order differs from run to run: give a list")
        members = [members] if isinstance(members, Tensor) else list(members)
        decaying = [p for p in members if _dimensions(p) >= 2]
        constant = [p for p in members if _dimensions(p) < 2]
        if decaying or not constant:
            groups.append({**group, "params": decaying})
        if constant:
            groups.append({**group, "params": constant, "weight_decay": 0.0})
    return groups


def _dimensions(parameter: Tensor | tuple[str, Tensor]) -> int:
    return getattr(parameter[1] if isinstance(parameter, tuple) else parameter, "ndim", 2)
