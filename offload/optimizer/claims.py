"""One parameter's update of one step: claimed when its gradient is there, applied to its state then or later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.optimizer.formats import MASTER_NAMES, MOMENTS, SCALE, StateFormat
from offload.optimizer.kernels import UpdateKernel
from offload.optimizer.operands import HyperParameters, Operands

# A state's copy of its weight.
WEIGHT = "weight"

State = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Claim:
    """An update, complete: later changes to the group and to `.grad` do not touch it.

    `format` is that of the state, `seed` that of the parameter's noise.
    """

    parameter: Tensor
    gradient: Tensor
    hyperparameters: HyperParameters
    format: StateFormat
    seed: int


def update_in_place(claim: Claim, state: State, kernel: UpdateKernel, scale: float, parts: Iterable[range]) -> None:
    """Updates the claimed parameter and its state, which is beside it; the gradient counts `scale` times.

    `parts`: the elements to update, of a contiguous parameter; all of another are updated.
    """
    parameter = claim.parameter
    if not parameter.is_contiguous():
        parameter.data.copy_(update_elsewhere(claim, state, claim.gradient, kernel, scale))
        return
    operands = operands_of(claim, state, parameter.detach(), claim.gradient)
    for part in parts:
        kernel(operands.part(part), state["step"], claim.hyperparameters, scale)


def update_elsewhere(
    claim: Claim, state: State, gradient: Tensor, kernel: UpdateKernel, scale: float, start: int = 0
) -> Tensor:
    """Updates a state that is not beside its parameter, with `gradient`, which is on the device of the state.

    State and gradient are the whole parameter's, or those of a part that begins with element `start`. Returns the new
    weight there, in the parameter's dtype. The parameter itself is left as it is.
    """
    weight = state.get(WEIGHT)
    if weight is None:
        weight = torch.empty_like(state[MASTER_NAMES[torch.float32]], dtype=claim.parameter.dtype)
    kernel(operands_of(claim, state, weight, gradient, start), state["step"], claim.hyperparameters, scale)
    return weight


def operands_of(claim: Claim, state: State, weight: Tensor, gradient: Tensor, start: int = 0) -> Operands:
    """Returns the operands of a claimed update whose weight is `weight`, contiguous, on the device of the state.

    `start`: the element of the parameter with which the weight begins.
    """
    master = claim.format.master_dtype(weight.dtype)
    return Operands(
        weight=_flat(weight),
        gradient=_flat(gradient),
        **{moment: _flat(state[name]) for moment, name in zip(MOMENTS, claim.format.moment_names, strict=True)},
        **{key: state.get(key) for key in map(SCALE.format, MOMENTS)},
        master=None if master is None else _flat(state[MASTER_NAMES[master]]),
        start=start,
        seed=claim.seed,
    )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1)
