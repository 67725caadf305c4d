"""Updates of many small parameters of a device by the same few calls.

A device is sent each call by the host, which takes longer than the update of a small parameter: one by one, the
hundreds of matrices of adapters would take much of a short step. A kernel that takes blocks updates all of them at
once, in flat copies. Torch's kernel takes lists of tensors; what it cannot read is gathered into flat float32 scratch,
one parameter behind the other, where one call converts it for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from offload.optimizer.claims import Claim, State, operands_of
from offload.optimizer.formats import MASTER_NAMES, MOMENTS, StateFormat
from offload.optimizer.kernel_choice import CheckedUpdate
from offload.optimizer.kernels import BlockwiseUpdate, UpdateKernel, fused_adamw_
from offload.optimizer.operands import HyperParameters, Operands
from offload.optimizer.rounding import join, split
from offload.torch_private.torch_internals import copy_each, scaled_tensors, views_of_flat

# The types of devices that are sent calls.
LAUNCHING = ("cuda",)
# The most elements that are updated at a time, with up to 25 bytes of scratch each. Updates of larger parameters take
# longer than their calls, and would only be slowed down by copies.
TILE = 1 << 22
# Elements that torch's kernel reads by one instruction, from a multiple of their bytes.
VECTOR = 4
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Scratch for values that are needed by the next call alone, and for gradients.
SPARE = "spare"


def in_two(claims: Iterable[Claim], is_placed: Callable[[Tensor], bool]) -> tuple[list[Claim], list[Claim]]:
    """Returns the claims of an optimizer to be updated one by one, and those that `update_together` takes.

    The second are of small contiguous parameters of a device, without noise and 8-bit scales, whose states are
    beside them: `is_placed` tells which are not.
    """
    claims, alone, together = list(claims), [], []
    known: dict[tuple[torch.device, torch.dtype, torch.dtype], bool] = {}
    for claim in claims:
        parameter, gradient = claim.parameter, claim.gradient
        kind = parameter.device, parameter.dtype, gradient.dtype
        if kind not in known:
            known[kind] = kind[0].type in LAUNCHING and _share_calls(claim.format, *kind[1:])
        fits = known[kind] and 0 < parameter.numel() <= TILE and parameter.is_contiguous() and gradient.is_contiguous()
        (together if fits and not is_placed(parameter) else alone).append(claim)
    # The second of two that share memory is updated from what the first has become.
    if together and _share_memory([claim.parameter for claim in claims]):
        return claims, []
    return alone, together


def update_together(
    claims: Iterable[Claim],
    begin: Callable[[list[Tensor]], list[State]],
    kernel_on: Callable[[torch.device], UpdateKernel],
    scale: float,
) -> None:
    """Makes these updates of `in_two` with the numbers of `claims.update_in_place`; gradients count `scale` times.

    `begin` counts the updates of parameters of one device and returns their states; `kernel_on` gives its kernel.
    Parameters share calls if they are alike in device, dtypes and hyper-parameters, and at most a tile together.
    """
    groups: dict[tuple[torch.device, torch.dtype, torch.dtype, HyperParameters], list[Claim]] = {}
    for claim in claims:
        parameter = claim.parameter
        kind = parameter.device, parameter.dtype, claim.gradient.dtype, claim.hyperparameters
        groups.setdefault(kind, []).append(claim)
    for (device, _, _, _), group in groups.items():
        kernel = kernel_on(device)
        # First those of whole vectors: in scratch they then begin at a vector, as they do alone. The kernel reads the
        # others number by number in any place, by instructions that may round differently.
        group.sort(key=lambda claim: claim.parameter.numel() % VECTOR != 0)
        start = elements = 0
        for index, claim in enumerate(group):
            elements += claim.parameter.numel()
            if elements > TILE:
                _update(group[start:index], begin, kernel, scale)
                start, elements = index, claim.parameter.numel()
        _update(group[start:], begin, kernel, scale)


def _share_memory(parameters: list[Tensor]) -> bool:
    spans = sorted([(parameter.data_ptr(), parameter.nbytes) for parameter in parameters])
    return any(start + size > following for (start, size), (following, _) in pairwise(spans))


def _share_calls(form: StateFormat, weight: torch.dtype, gradient: torch.dtype) -> bool:
    """Tells whether parameters of dtype `weight` can share calls."""
    has_noise = weight == torch.bfloat16 and form.master_dtype(weight) is None
    return not has_noise and form.moment_dtype != torch.uint8 and weight in FLOATS and gradient in FLOATS


def _update(
    batch: Sequence[Claim], begin: Callable[[list[Tensor]], list[State]], kernel: UpdateKernel, scale: float
) -> None:
    first, weights = batch[0], [claim.parameter for claim in batch]
    states = begin(weights)
    if isinstance(kernel, CheckedUpdate):
        one = operands_of(first, states[0], weights[0].detach(), first.gradient)
        if (blockwise := kernel.blockwise(one, first.hyperparameters)) is not None:
            _update_blocks(batch, states, blockwise, scale)
            return
    scratch = _Scratch(weights)
    masters = _Masters(weights, states, first.format, scratch)
    stored = {name: [state[name] for state in states] for name in MOMENTS}
    moments = {
        name: tensors if tensors[0].dtype == torch.float32 else scratch.gather(name, tensors).views
        for name, tensors in stored.items()
    }
    gradients = _float32_gradients([claim.gradient for claim in batch], scale, scratch)
    steps = [state["step"] for state in states]
    fused_adamw_(masters.tensors, gradients, *moments.values(), steps, first.hyperparameters)
    for name, tensors in stored.items():
        if tensors is not moments[name]:
            copy_each(tensors, moments[name])
    masters.write()


def _update_blocks(batch: Sequence[Claim], states: Sequence[State], kernel: BlockwiseUpdate, scale: float) -> None:
    """Updates flat copies of the operands, in their own formats, in which every parameter begins with a block."""
    first, weights = batch[0], [claim.parameter for claim in batch]
    master = first.format.master_dtype(weights[0].dtype)
    operands = {"weight": weights} | {name: [state[name] for state in states] for name in MOMENTS}
    if master is not None:
        operands["master"] = [state[MASTER_NAMES[master]] for state in states]
    blocks = [-(-weight.numel() // kernel.block) for weight in weights]
    places = []
    for weight, count in zip(weights, blocks, strict=True):
        places += [weight, _gap(count * kernel.block - weight.numel())]

    def gathered(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Returns a flat copy, the parts of it, and the tensors that these are copies of, both as bits."""
        dtype = tensors[0].dtype
        # A copy of bfloat16 by torch's kernel for many tensors would change the bits of a NaN.
        bits = [tensor.view(torch.int16) for tensor in tensors] if dtype == torch.bfloat16 else tensors
        flat = torch.empty(sum(blocks) * kernel.block, dtype=bits[0].dtype, device=bits[0].device)
        copies = views_of_flat(flat, places)[::2]
        copy_each(copies, bits)
        return flat.view(dtype), copies, bits

    written = {name: gathered(tensors) for name, tensors in operands.items()}
    gradient, _, _ = gathered([claim.gradient for claim in batch])
    steps = torch.stack([state["step"] for state in states])[_parameter_of_block(tuple(blocks), gradient.device)]
    flats = {name: flat for name, (flat, _, _) in written.items()}
    kernel(Operands(gradient=gradient, **flats), steps, first.hyperparameters, scale)
    for _, copies, bits in written.values():
        copy_each(bits, copies)


@functools.cache
def _gap(elements: int) -> Tensor:
    """Stands for so many elements between two parameters."""
    return torch.empty(elements, device="meta")


@functools.lru_cache(maxsize=256)
def _parameter_of_block(blocks: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the number of the parameter of each block on `device`, where parameter n has `blocks[n]` of them."""
    return torch.arange(len(blocks)).repeat_interleave(torch.tensor(blocks)).to(device)


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
        self._kind = kind = form.master_dtype(weights[0].dtype)
        self._beside = [] if kind is None else [state[MASTER_NAMES[kind]] for state in states]
        self.tensors = weights if kind is None else self._beside
        if kind == torch.int16:
            # A copy of bfloat16 by torch's kernel for many tensors would change the bits of a NaN.
            self._bits = [weight.view(torch.int16) for weight in weights]
            weight = scratch.gather("weight", self._bits, torch.int16).flat.view(torch.bfloat16)
            remainder = scratch.gather("remainder", self._beside, torch.int16).flat
            join(weight, remainder, scratch.take("master").flat)
            self.tensors = scratch.take("master").views

    def write(self) -> None:
        """Rounds the masters, which were updated, to the weights and to what makes the masters beside these."""
        if self._kind == torch.float32:
            copy_each(self._weights, self.tensors)
        elif self._kind == torch.int16:
            bits, remainder = (self._scratch.take(name, torch.int16) for name in ("weight", "remainder"))
            split(self._scratch.take("master").flat, bits.flat.view(torch.bfloat16), remainder.flat)
            copy_each(self._beside, remainder.views)
            copy_each(self._bits, bits.views)
