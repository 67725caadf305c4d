"""One parameter's update of one step: claimed when its gradient is there, applied to its state then or later.

A device is sent each kernel by the host, which takes longer than the update of a small parameter: one by one, the
hundreds of matrices of adapters would take much of a short step. So small parameters of a device are updated together,
in flat copies of their operands, by a kernel that takes blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from offload.optimizer.formats import MASTER_NAMES, MOMENTS, SCALE, StateFormat
from offload.optimizer.kernel_choice import CheckedUpdate
from offload.optimizer.kernels import BlockwiseUpdate, HyperParameters, Operands, UpdateKernel
from offload.torch_private.torch_internals import copy_each, views_of_flat

# A state's copy of its weight.
WEIGHT = "weight"
# The types of devices that are sent kernels.
LAUNCHING = ("cuda",)
# The most elements that are updated together, with up to 25 bytes of scratch each. Updates of larger parameters take
# longer than their calls, and would only be slowed down by copies.
TILE = 1 << 22
FLOATS = {torch.float32, torch.bfloat16}

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

    Both are the whole parameter's, or those of a part that begins with element `start`. Returns the new weight there,
    in the parameter's dtype, and leaves the parameter as it is.
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


# Small parameters of a device.


def in_two(claims: Iterable[Claim], is_placed: Callable[[Tensor], bool]) -> tuple[list[Claim], list[Claim]]:
    """Returns the claims of an optimizer to be updated one by one, and those that `update_together` takes.

    These are of small contiguous parameters of a device, without noise and 8-bit scales, and not `is_placed`.
    """
    claims, alone, together = list(claims), [], []
    for claim in claims:
        parameter, gradient, format = claim.parameter, claim.gradient, claim.format
        fits = (
            parameter.device.type in LAUNCHING
            and {parameter.dtype, gradient.dtype} <= FLOATS
            and format.moment_dtype != torch.uint8
            and (parameter.dtype == torch.float32 or format.master_dtype(parameter.dtype) is not None)
            and 0 < parameter.numel() <= TILE
            and parameter.is_contiguous()
            and gradient.is_contiguous()
        )
        (together if fits and not is_placed(parameter) else alone).append(claim)
    if together:
        # The second of two that share memory is updated from what the first has become.
        spans = sorted([(claim.parameter.data_ptr(), claim.parameter.nbytes) for claim in claims])
        if any(start + size > following for (start, size), (following, _) in pairwise(spans)):
            return claims, []
    return alone, together


def update_together(
    claims: Iterable[Claim],
    begin: Callable[[list[Tensor]], list[State]],
    kernel_on: Callable[[torch.device], UpdateKernel],
    scale: float,
) -> None:
    """Makes these updates of `in_two` with the numbers of `update_in_place`; gradients count `scale` times.

    `begin` and `kernel_on` are those of the optimizer. Parameters share a launch if they are alike in device, dtypes
    and hyper-parameters, and at most a tile together. A kernel that takes no blocks updates them one by one.
    """
    groups: dict[tuple[torch.device, torch.dtype, torch.dtype, HyperParameters], list[Claim]] = {}
    for claim in claims:
        parameter = claim.parameter
        kind = parameter.device, parameter.dtype, claim.gradient.dtype, claim.hyperparameters
        groups.setdefault(kind, []).append(claim)
    for (device, _, _, _), group in groups.items():
        kernel = kernel_on(device)
        start = elements = 0
        for index, claim in enumerate(group):
            elements += claim.parameter.numel()
            if elements > TILE:
                _update(group[start:index], begin, kernel, scale)
                start, elements = index, claim.parameter.numel()
        _update(group[start:], begin, kernel, scale)


def _update(
    batch: Sequence[Claim], begin: Callable[[list[Tensor]], list[State]], kernel: UpdateKernel, scale: float
) -> None:
    states, first = begin([claim.parameter for claim in batch]), batch[0]
    one = operands_of(first, states[0], first.parameter.detach(), first.gradient)
    blockwise = kernel.blockwise(one, first.hyperparameters) if isinstance(kernel, CheckedUpdate) else None
    if blockwise is not None:
        _update_blocks(batch, states, blockwise, scale)
        return
    for claim, state in zip(batch, states, strict=True):
        update_in_place(claim, state, kernel, scale, [range(claim.parameter.numel())])


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
