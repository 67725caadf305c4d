"""Updates of many small parameters of a device by one call of torch's kernel.

A device is sent each call by the host, which takes longer than the update of a small parameter: one by one, the
hundreds of matrices of adapters would take much of a short step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from offload.optimizer import kernels
from offload.optimizer.claims import Claim
from offload.optimizer.formats import MOMENTS
from offload.optimizer.operands import HyperParameters
from offload.optimizer.states import State
from offload.runtime.torch_internals import fused_adamw_, scaled_tensors

# The types of devices that are sent calls.
LAUNCHING = ("cuda",)


def in_two(claims: Iterable[Claim], is_elsewhere: Callable[[Tensor], bool]) -> tuple[list[Claim], list[Claim]]:
    """Returns the claims to be updated one by one, and those that `update_together` takes.

    The second are of parameters that torch's kernel updates without conversions, beside their states.
    """
    alone, together = [], []
    for claim in claims:
        parameter, gradient = claim.parameter, claim.gradient
        fits = parameter.device.type in LAUNCHING and 0 < parameter.numel() <= kernels.DEVICE_TILE
        fits = fits and all(each.dtype == torch.float32 and each.is_contiguous() for each in (parameter, gradient))
        fits = fits and claim.format.moment_dtype == torch.float32 and not is_elsewhere(parameter)
        (together if fits else alone).append(claim)
    return alone, together


def update_together(claims: Iterable[tuple[Claim, State]], scale: float) -> None:
    """Makes these updates of `in_two` as `claims.update_in_place` does; each call is for one device and one group.

    Scaled gradients take scratch of a tile, as in `kernels.FusedUpdate`.
    """
    groups: dict[tuple[torch.device, HyperParameters], list[tuple[Claim, State]]] = {}
    for claim, state in claims:
        groups.setdefault((claim.parameter.device, claim.hyperparameters), []).append((claim, state))
    for group in groups.values():
        start = elements = 0
        for index, (claim, _) in enumerate(group):
            elements += claim.parameter.numel()
            if elements > kernels.DEVICE_TILE:
                _update(group[start:index], scale)
                start, elements = index, claim.parameter.numel()
        _update(group[start:], scale)


def _update(batch: list[tuple[Claim, State]], scale: float) -> None:
    gradients = [claim.gradient.detach() for claim, _ in batch]
    fused_adamw_(
        [claim.parameter.detach() for claim, _ in batch],
        gradients if scale == 1 else scaled_tensors(gradients, scale),
        *[[state[moment] for _, state in batch] for moment in MOMENTS],
        [],
        [state["step"] for _, state in batch],
        **batch[0][0].hyperparameters._asdict(),
        amsgrad=False,
        maximize=False,
    )
