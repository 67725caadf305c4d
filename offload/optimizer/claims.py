"""One parameter's update of one step: claimed when its gradient is there, applied to its state then or later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.optimizer.formats import MASTER_NAMES, MOMENTS, SCALE, StateFormat
from offload.optimizer.kernels import UpdateKernel
from offload.optimizer.operands import HyperParameters, Operands
from offload.optimizer.states import WEIGHT, State


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


def update_in_place(
    claim: Claim, state: State, kernel: UpdateKernel, scale: float, slices: Sequence[range] | None = None
) -> None:
    """Updates the claimed parameter and its state, which is beside it; the gradient counts `scale` times.

    `slices`: the elements to update, of a contiguous parameter; None updates all.
    """
    parameter = claim.parameter
    if parameter.is_contiguous():
        _update(claim, state, parameter.detach(), claim.gradient, kernel, scale, slices)
    else:
        parameter.data.copy_(update_elsewhere(claim, state, claim.gradient, kernel, scale))


def update_elsewhere(claim: Claim, state: State, gradient: Tensor, kernel: UpdateKernel, scale: float) -> Tensor:
    """Updates a state that is not beside its parameter, with `gradient`, which is on the device of the state.

    Returns the new weight there: the parameter's shape and dtype. The parameter itself is left as it is.
    """
    weight = state.get(WEIGHT)
    if weight is None:
        weight = torch.empty_like(state[MASTER_NAMES[torch.float32]], dtype=claim.parameter.dtype)
    _update(claim, state, weight, gradient, kernel, scale)
    return weight


def update_slice(
    claim: Claim, state: State, start: int, gradient: Tensor, kernel: UpdateKernel, scale: float
) -> Tensor:
    """Updates a state of a part of the claimed parameter, from element `start` on, as `update_elsewhere` does all.

    `gradient` is that of the part, 1-D on the device of the state. Returns the new weight of the part there.
    """
    weight = state.get(WEIGHT)
    if weight is None:
        weight = torch.empty_like(state[MASTER_NAMES[torch.float32]], dtype=claim.parameter.dtype)
    _update(claim, state, weight, gradient, kernel, scale, start=start)
    return weight


def _update(
    claim: Claim,
    state: State,
    weight: Tensor,
    gradient: Tensor,
    kernel: UpdateKernel,
    scale: float,
    slices: Sequence[range] | None = None,
    start: int = 0,
) -> None:
    operands = operands_of(claim, state, weight, gradient, start)
    for piece in [operands] if slices is None else map(operands.part, slices):
        kernel(piece, state["step"], claim.hyperparameters, scale)


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
        rounds_moments=claim.format.rounds_moments,
    )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1)
