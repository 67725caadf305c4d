"""The states of AdamW in a state dict: written in torch's layout, checked against the model when read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offload.optimizer.block_quantise import scales_for
from offload.optimizer.conversions import COMPENSATION, in_format, moment_names_of
from offload.optimizer.formats import MASTER_NAMES, MOMENTS, SCALE, StateFormat
from offload.optimizer.param_groups import check_settings
from offload.optimizer.states import WEIGHT, State

# A compensation is written as bits: torch's AdamW would carry along bfloat16 beside a bfloat16 parameter unseen, while
# it makes numbers of bits.
WRITTEN_AS = {name: torch.int16 if name == COMPENSATION else dtype for dtype, name in MASTER_NAMES.items()}


def states_as_torchs(state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Returns `state_dict` with every state in the strides of its parameter; `parameters` are in the order of its
    groups.

    torch's fused kernels walk memory and expect that. States of contiguous parameters are not copied. Copies of weights
    are left out. Compensations are the bits of bfloat16 (int16), which torch's AdamW makes other numbers of. It takes
    no moments in 8 bits: it ends at its first step.
    """
    states = {
        index: {name: tensor for name, tensor in state.items() if name != WEIGHT}
        for index, state in state_dict["state"].items()
    }
    for index, parameter in enumerate(parameters):
        if index in states and not parameter.is_contiguous():
            states[index] = {name: _laid_out(tensor, parameter) for name, tensor in states[index].items()}
    for state in states.values():
        if COMPENSATION in state:
            state[COMPENSATION] = state[COMPENSATION].view(WRITTEN_AS[COMPENSATION])
    return {**state_dict, "state": states}


@contextmanager
def loads_states(
    optimizer: torch.optim.Optimizer,
    to_load: Callable[[dict[str, Any]], dict[Tensor, State]],
    adopt: Callable[[dict[Tensor, State]], None],
) -> Iterator[None]:
    """In the block torch's `optimizer.load_state_dict` loads the settings alone; `adopt` gets the states.

    They are what `to_load` makes of the state dict that the hooks which run before loading have returned. The hooks for
    afterwards find them adopted. torch would round float32 state of a bf16 parameter to bf16.
    """
    found: dict[Tensor, State] = {}

    def take(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        found.update(to_load(state_dict))
        return {**state_dict, "state": {}}

    hooks = (
        optimizer.register_load_state_dict_pre_hook(take),
        optimizer.register_load_state_dict_post_hook(lambda _: adopt(found), prepend=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def states_to_load(
    state_dict: dict[str, Any], parameters: Sequence[Tensor], format: StateFormat
) -> dict[Tensor, State]:
    """Returns the states in `state_dict`, of this AdamW in any format or torch's, by parameter, in `format`.

    A master is left out where it is redundant or outdated: a float32 parameter is its own master, and torch's AdamW
    rounds the master of another to the parameter's dtype and does not update it.

    Raises ValueError where a state is missing, its shape is not that of its parameter, or a setting is not supported.
    """
    for group in state_dict["param_groups"]:
        check_settings(group, "the optimizer state to load")
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    found = {}
    # Where the numbers of parameters differ, torch raises an error.
    for index, parameter in zip(indices, parameters, strict=False):
        saved = state_dict["state"].get(index)
        if not saved:
            continue
        moments = moment_names_of(saved)
        scales = [SCALE.format(moment) for moment, name in zip(MOMENTS, moments, strict=True) if name != moment]
        required = ("step", *moments, *scales)
        if missing := [name for name in required if name not in saved]:
            raise ValueError(
                f"the optimizer state to load lacks {missing[0]} of parameter {index}: it is not that of AdamW"
            )
        names = (*required, *MASTER_NAMES.values())
        states = {name: torch.as_tensor(saved[name]) for name in names if name in saved}
        for name, tensor in states.items():
            _check_shape(name, tensor, index, parameter)
        states["step"] = states["step"].reshape(()).float()
        for dtype, name in MASTER_NAMES.items():
            if name in states:
                if parameter.dtype == torch.float32 or states[name].dtype != WRITTEN_AS[name]:
                    del states[name]
                else:
                    states[name] = states[name].view(dtype)
        states = in_format(states, parameter, format)
        found[parameter] = states
    return found


def _check_shape(name: str, tensor: Tensor, index: int, parameter: Tensor) -> None:
    is_scale = name in map(SCALE.format, MOMENTS)
    shape = (scales_for(parameter.numel()),) if is_scale else tuple(parameter.shape)
    fits = tensor.numel() == 1 if name == "step" else tuple(tensor.shape) == shape
    if not fits:
        wanted = "one number" if name == "step" else f"of shape {shape}"
        raise ValueError(
            f"the optimizer state to load is that of another model: {name} of parameter {index} has shape"
            f" {tuple(tensor.shape)}, and is to be {wanted}"
        )


def _laid_out(state: Tensor, parameter: Tensor) -> Tensor:
    if state.shape != parameter.shape:
        return state
    return torch.empty_like(parameter, dtype=state.dtype, device=state.device, requires_grad=False).copy_(state)
