"""Checks what AdamW gets from its caller: parameter groups, and states in a state dict.

States are written in torch's layout, and read in those of 16 and 32 bits or in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offload.knobs import KnobError, in_range
from offload.optimizer.claims import WEIGHT, State
from offload.optimizer.formats import CODES, MASTER_NAMES, MOMENTS, SCALE, StateFormat, scales_for
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

    Those are the parameters of fewer than two dimensions. A group with both kinds becomes two, the second without
    decay. Raises TypeError for a set of parameters, as torch does. What is no tensor stays in the first, for torch to
    refuse.
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


def states_as_torchs(state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Returns `state_dict` with every state in the strides of its parameter; `parameters` are in the order of groups.

    torch's fused kernels walk memory and expect that. Copies of weights are left out. torch's AdamW takes no moments in
    8 bits: it ends at its first step.
    """
    states = {
        index: {name: tensor for name, tensor in state.items() if name != WEIGHT}
        for index, state in state_dict["state"].items()
    }
    for index, parameter in enumerate(parameters):
        if index in states and not parameter.is_contiguous():
            states[index] = {name: _laid_out(tensor, parameter) for name, tensor in states[index].items()}
    return {**state_dict, "state": states}


@contextmanager
def loads_states(
    optimizer: torch.optim.Optimizer,
    to_load: Callable[[dict[str, Any]], dict[Tensor, State]],
    adopt: Callable[[dict[Tensor, State]], None],
) -> Iterator[None]:
    """In the block torch's `optimizer.load_state_dict` loads the settings alone; `adopt` gets the states.

    They are what `to_load` makes of what the pre-hooks returned; the post-hooks find them adopted. torch would round
    float32 state of a bf16 parameter to bf16.
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

    Raises ValueError for a missing state, another shape, or a setting that is not supported, and as `in_format`.
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
        found[parameter] = in_format(states, parameter, format)
    return found


def moment_names_of(state: Container[str]) -> tuple[str, str]:
    """Returns the names that the moments have in `state`: those of codes where it has codes."""
    first, second = (CODES.format(name) if CODES.format(name) in state else name for name in MOMENTS)
    return first, second


def in_format(state: State, weight: Tensor, format: StateFormat) -> State:
    """Returns a state of another format in `format`; tensors that fit already are the same, without a copy.

    What makes the master of the parameter `weight` is kept if the format has such a tensor, in this dtype: torch's
    AdamW rounds it and does not update it. Raises ValueError where one alone has moments in 8 bits.
    """
    found, moments = {"step": state["step"]}, moment_names_of(state)
    if moments != format.moment_names:
        found_in, remedy = ("in 8 bits", "int8") if moments != MOMENTS else ("in floats", "fp32 or bf16")
        raise ValueError(f"the optimizer state to load has moments {found_in}: give the optimizer state_dtype={remedy}")
    for moment, name in zip(MOMENTS, moments, strict=True):
        found[name] = state[name].to(format.moment_dtype)
        if name != moment:
            found[SCALE.format(moment)] = state[SCALE.format(moment)]
    dtype = format.master_dtype(weight.dtype)
    if dtype is not None and (name := MASTER_NAMES[dtype]) in state and state[name].dtype == dtype:
        found[name] = state[name]
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
