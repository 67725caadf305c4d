"""The states of AdamW in a state dict: written in torch's layout, checked against the model when read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offload.optimizer.states import MOMENTS, State

REQUIRED = ("step", *MOMENTS)


def states_as_torchs(state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Returns `state_dict` with every state in the strides of its parameter; `parameters` are in the order of its
    groups.

    torch's fused kernels walk memory and expect that. States of contiguous parameters are not copied.
    """
    states = dict(state_dict["state"])
    for index, parameter in enumerate(parameters):
        if index in states and not parameter.is_contiguous():
            states[index] = {name: _laid_out(tensor, parameter) for name, tensor in states[index].items()}
    return {**state_dict, "state": states}


def states_to_load(state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> dict[Tensor, State]:
    """Returns the states in `state_dict`, of this AdamW or torch's, by parameter, in the order of its groups.

    A master is left out where it is redundant or outdated: a float32 parameter is the truth itself, and torch's AdamW
    rounds the master of another to the parameter's dtype and does not update it.

    Raises ValueError where a state is missing or its shape is not that of its parameter.
    """
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    found = {}
    # Where the numbers of parameters differ, torch raises an error.
    for index, parameter in zip(indices, parameters, strict=False):
        saved = state_dict["state"].get(index)
        if not saved:
            continue
        if missing := [name for name in REQUIRED if name not in saved]:
            raise ValueError(f"the optimizer state to load lacks {missing[0]} of parameter {index}: not that of AdamW")
        states = {name: torch.as_tensor(saved[name]) for name in (*REQUIRED, "master") if name in saved}
        for name, tensor in states.items():
            _check_shape(name, tensor, index, parameter)
        states["step"] = states["step"].reshape(())
        if parameter.dtype == torch.float32 or ("master" in states and states["master"].dtype != torch.float32):
            states.pop("master", None)
        found[parameter] = states
    return found


def _check_shape(name: str, tensor: Tensor, index: int, parameter: Tensor) -> None:
    fits = tensor.numel() == 1 if name == "step" else tensor.shape == parameter.shape
    if not fits:
        wanted = "one number" if name == "step" else f"of shape {tuple(parameter.shape)}"
        raise ValueError(
            f"the optimizer state to load is that of another model: {name} of parameter {index} has shape"
            f" {tuple(tensor.shape)}, and is to be {wanted}"
        )


def _laid_out(state: Tensor, parameter: Tensor) -> Tensor:
    if not state.ndim:
        return state
    return torch.empty_like(parameter, dtype=state.dtype, device=state.device, requires_grad=False).copy_(state)
