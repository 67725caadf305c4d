"""One parameter's update of one step: claimed when its gradient is there, applied to its state then or later."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offload.optimizer.kernels import HyperParameters, Operands, UpdateKernel
from offload.optimizer.states import State


@dataclass(frozen=True, eq=False)
class Claim:
    """An update, complete: later changes to the group and to `.grad` do not touch it."""

    parameter: Tensor
    gradient: Tensor
    hyperparameters: HyperParameters


def update_in_place(claim: Claim, state: State, kernel: UpdateKernel, scale: float) -> None:
    """Updates the claimed parameter and its state, which is beside it; the gradient counts `scale` times."""
    parameter = claim.parameter
    master = state.get("master", parameter.detach())
    operands = Operands(
        weight=_flat(parameter.detach()) if parameter.is_contiguous() else _flat(master),
        gradient=_flat(claim.gradient),
        master=_flat(master),
        exp_avg=_flat(state["exp_avg"]),
        exp_avg_sq=_flat(state["exp_avg_sq"]),
    )
    kernel(operands, state["step"], claim.hyperparameters, scale)
    if not parameter.is_contiguous():
        parameter.data.copy_(master)


def update_elsewhere(claim: Claim, state: State, gradient: Tensor, kernel: UpdateKernel, scale: float) -> Tensor:
    """Updates a state that is not beside its parameter, with `gradient`, which is on the device of the state.

    Returns the new weight there: the parameter's shape and dtype. The parameter itself is left as it is.
    """
    weight = torch.empty_like(state["master"], dtype=claim.parameter.dtype)
    operands = (weight, gradient, state["master"], state["exp_avg"], state["exp_avg_sq"])
    kernel(Operands(*map(_flat, operands)), state["step"], claim.hyperparameters, scale)
    return weight


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1)
