"""Updates of many small parameters of a device by the same few calls.

A device is sent each call by the host, which takes longer than the update of a small parameter: one by one, the
hundreds of matrices of adapters would take much of a short step. Here torch's kernel takes lists of tensors. What it
cannot read is gathered into flat float32 scratch, one parameter behind the other, where one call converts it for all.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from offload.optimizer import kernels
from offload.optimizer.claims import Claim
from offload.optimizer.formats import MASTER_NAMES, MOMENTS, StateFormat
from offload.optimizer.operands import HyperParameters
from offload.optimizer.rounding import join, round_weights, split
from offload.optimizer.states import State
from offload.runtime.torch_internals import copy_each, fused_adamw_, scaled_tensors, views_of_flat

# The types of devices that are sent calls.
LAUNCHING = ("cuda",)
# The most elements that are gathered at a time, with up to 25 bytes of scratch each. Updates of larger parameters take
# longer than their calls, and would only be slowed down by the copies.
GATHERED_TILE = 1 << 22
# Elements that torch's kernel reads by one instruction, from a multiple of their bytes.
VECTOR = 4
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Scratch for values that are needed by the next call alone, and for gradients.
SPARE = "spare"


def in_two(claims: Iterable[Claim], elsewhere: Container[Tensor]) -> tuple[list[Claim], list[Claim]]:
    """Returns the claims of an optimizer to be updated one by one, and those that `update_together` takes.

    The second are of small contiguous parameters of a device, without noise and 8-bit scales. The states of parameters
    in `elsewhere` are not beside them.
    """
    claims, alone, together = list(claims), [], []
    largest: dict[tuple[torch.device, torch.dtype, torch.dtype], int] = {}
    for claim in claims:
        parameter, gradient = claim.parameter, claim.gradient
        kind = parameter.device, parameter.dtype, gradient.dtype
        if kind not in largest:
            largest[kind] = _tile(claim.format, *kind[1:]) if kind[0].type in LAUNCHING else 0
        fits = 0 < parameter.numel() <= largest[kind] and parameter.is_contiguous() and gradient.is_contiguous()
        (together if fits and parameter not in elsewhere else alone).append(claim)
    # The second of two that share memory is updated from what the first has become.
    if together and _share_memory([claim.parameter for claim in claims]):
        return claims, []
    return alone, together


def update_together(claims: Iterable[Claim], begin: Callable[[list[Tensor]], list[State]], scale: float) -> None:
    """Makes these updates of `in_two` with the numbers of `claims.update_in_place`; gradients count `scale` times.

    `begin` counts the updates of parameters of one device and returns their states. Parameters share calls if they are
    alike in device, dtypes and hyper-parameters, and at most a tile together.
    """
    groups: dict[tuple[torch.device, torch.dtype, torch.dtype, HyperParameters], list[Claim]] = {}
    for claim in claims:
        parameter = claim.parameter
        kind = parameter.device, parameter.dtype, claim.gradient.dtype, claim.hyperparameters
        groups.setdefault(kind, []).append(claim)
    for (_, weight, gradient, _), group in groups.items():
        tile = _tile(group[0].format, weight, gradient)
        # First those of whole vectors: in scratch they then begin at a vector, as they do alone. The kernel reads the
        # others number by number in any place, by instructions that may round differently.
        group.sort(key=lambda claim: claim.parameter.numel() % VECTOR != 0)
        start = elements = 0
        for index, claim in enumerate(group):
            elements += claim.parameter.numel()
            if elements > tile:
                _update(group[start:index], begin, scale)
                start, elements = index, claim.parameter.numel()
        _update(group[start:], begin, scale)


def _share_memory(parameters: list[Tensor]) -> bool:
    spans = sorted([(parameter.data_ptr(), parameter.nbytes) for parameter in parameters])
    return any(start + size > following for (start, size), (following, _) in pairwise(spans))


def _tile(form: StateFormat, weight: torch.dtype, gradient: torch.dtype) -> int:
    """Returns the most elements of parameters of dtype `weight` that share calls; 0 if they cannot."""
    has_noise = form.rounds_moments or (weight == torch.bfloat16 and form.master_dtype(weight) is None)
    if has_noise or form.moment_dtype == torch.uint8 or weight not in FLOATS or gradient not in FLOATS:
        return 0
    is_converted = any(dtype != torch.float32 for dtype in (weight, gradient, form.moment_dtype))
    return GATHERED_TILE if is_converted else kernels.DEVICE_TILE


def _update(batch: Sequence[Claim], begin: Callable[[list[Tensor]], list[State]], scale: float) -> None:
    first, weights = batch[0], [claim.parameter for claim in batch]
    states, scratch = begin(weights), _Scratch(weights)
    masters = _Masters(weights, states, first.format, scratch)
    stored = {name: [state[name] for state in states] for name in MOMENTS}
    moments = {
        name: tensors if tensors[0].dtype == torch.float32 else scratch.gather(name, tensors).views
        for name, tensors in stored.items()
    }
    fused_adamw_(
        masters.tensors,
        _float32_gradients([claim.gradient for claim in batch], scale, scratch),
        *moments.values(),
        [],
        [state["step"] for state in states],
        **first.hyperparameters._asdict(),
        amsgrad=False,
        maximize=False,
    )
    for name, tensors in stored.items():
        if tensors is not moments[name]:
            copy_each(tensors, moments[name])
    masters.write()


class _Flat(NamedTuple):
    """Memory for a batch: a flat tensor, and a view of it for each parameter, one behind the other, of its shape."""

    flat: Tensor
    views: list[Tensor]


class _Scratch:
    """Flat tensors for a batch of `weights`, each made at its first use, by name and dtype."""

    def __init__(self, weights: list[Tensor]):
        self._weights = weights
        self._elements = sum(map(Tensor.numel, weights))
        self._made: dict[tuple[str, torch.dtype], _Flat] = {}

    def take(self, name: str, dtype: torch.dtype = torch.float32) -> _Flat:
        if (name, dtype) not in self._made:
            flat = torch.empty(self._elements, dtype=dtype, device=self._weights[0].device)
            self._made[name, dtype] = _Flat(flat, views_of_flat(flat, self._weights))
        return self._made[name, dtype]

    def gather(self, name: str, tensors: list[Tensor], dtype: torch.dtype = torch.float32) -> _Flat:
        """Copies the values of tensors, of the shapes of the weights, into scratch of `dtype`."""
        taken = self.take(name, dtype)
        copy_each(taken.views, tensors)
        return taken


def _float32_gradients(gradients: list[Tensor], scale: float, scratch: _Scratch) -> list[Tensor]:
    if gradients[0].dtype == torch.float32:
        return gradients if scale == 1 else scaled_tensors(gradients, scale)
    gathered = scratch.gather(SPARE, gradients)
    if scale != 1:
        gathered.flat.mul_(scale)
    return gathered.views


class _Masters:
    """The float32 masters of a batch of weights: `tensors`, which are scratch where no state has them."""

    def __init__(self, weights: list[Tensor], states: list[State], form: StateFormat, scratch: _Scratch):
        self._weights, self._scratch = weights, scratch
        self._kind = form.master_dtype(weights[0].dtype)
        self._beside = [] if self._kind is None else [state[MASTER_NAMES[self._kind]] for state in states]
        if weights[0].dtype == torch.bfloat16:
            # A copy of bfloat16 by torch's kernel for many tensors would change the bits of a NaN.
            self._bits = [weight.view(torch.int16) for weight in weights]
        if self._kind == torch.int16:
            weight = scratch.gather("weight", self._bits, torch.int16).flat.view(torch.bfloat16)
            remainder = scratch.gather("remainder", self._beside, torch.int16).flat
            join(weight, remainder, scratch.take("master").flat)
            self.tensors = scratch.take("master").views
        elif self._kind == torch.bfloat16:
            compensation = scratch.gather(SPARE, self._beside).flat
            scratch.gather("master", weights).flat.add_(compensation)
            self.tensors = scratch.take("master").views
        else:
            self.tensors = weights if self._kind is None else self._beside

    def write(self) -> None:
        """Rounds the masters, which were updated, to the weights and to what makes the masters beside these."""
        dtype, scratch = self._weights[0].dtype, self._scratch
        if dtype == torch.float16:
            copy_each(self._weights, self.tensors)
        if dtype != torch.bfloat16:
            return
        bits = scratch.take("weight", torch.int16)
        weight = bits.flat.view(torch.bfloat16)
        if self._kind == torch.float32:
            round_weights(scratch.gather(SPARE, self.tensors).flat, weight)
        elif self._kind == torch.int16:
            remainder = scratch.take("remainder", torch.int16)
            split(scratch.take("master").flat, weight, remainder.flat)
            copy_each(self._beside, remainder.views)
        else:
            master = scratch.take("master")
            round_weights(master.flat, weight)
            master.flat.sub_(weight)
            copy_each(self._beside, master.views)
        copy_each(self._bits, bits.views)
