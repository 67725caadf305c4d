"""The states of AdamW in a state dictionary: torch's layout when written, checked against the model when read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
NEEDED = ("step", *MOMENTS)


def is_own_master(parameter: Tensor) -> bool:
    """Whether a parameter is updated in place, without a float32 copy."""
    # Kernels walk memory: on tensors of unlike strides they would pair up elements that do not belong together.
    return parameter.dtype == torch.float32 and parameter.is_contiguous()


def states_as_torchs(state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """`state_dict` of `parameters`, in the order of its groups, with states of their parameters' strides.

    torch's fused kernels walk memory and expect that. What is contiguous is not copied.
    """
    states = dict(state_dict["state"])
    for index, parameter in enumerate(parameters):
        if index in states and not parameter.is_contiguous():
            states[index] = {name: _laid_out(tensor, parameter) for name, tensor in states[index].items()}
    return {**state_dict, "state": states}


def states_to_load(state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> dict[Tensor, dict[str, Tensor]]:
    """The states in `state_dict`, of this AdamW or torch's, that `parameters`, in the order of its groups, may take.

    A master is left out where it tells nothing or is outdated: a float32 parameter is the truth itself, and torch's
    AdamW rounds the master of another to the parameter's dtype and does not update it.

    Raises ValueError where a state is missing or its shape is not that of its parameter.
    """
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    found = {}
    # Where the numbers of parameters differ, torch says so.
    for index, parameter in zip(indices, parameters, strict=False):
        saved = state_dict["state"].get(index)
        if not saved:
            continue
        if missing := [name for name in NEEDED if name not in saved]:
            raise ValueError(f"the optimizer state to load lacks {missing[0]} of parameter {index}: not that of AdamW")
        states = {name: torch.as_tensor(saved[name]) for name in (*NEEDED, "master") if name in saved}
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
