"""Divides the bytes of a unit among processes that share its home, into equal slices, and gradients into flat buckets.

A process copies in its slice, and all gather the others' (ZeRO-3 gathers whole parameters so, Rajbhandari et al. 2020).
The slice that a process copies in is the one that it updates: so its own updates are the only ones that its copies have
to wait for. What stays on the devices is summed bucket by bucket, as by PyTorch DDP (Li et al. 2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offload.sharing.sharers import OWN_HOMES
from offload.torch_private.torch_internals import copy_each, holders_of_memory
from offload.weights.units.partition import CutModel, Window
from offload.weights.units.unit import OffloadUnit, UnitTensor

# The alignment of tensors that processes share, and of their slices: 256 numbers, a block of states in 8 bits.
SHARED_ALIGNMENT_BYTES = 1024


@dataclass(frozen=True)
class Slices:
    """The slices of a flat buffer of `nbytes`, divided among `count` processes.

    Each begins at a multiple of SHARED_ALIGNMENT_BYTES. The last ones may lie partly or wholly behind the end.
    """

    nbytes: int
    count: int

    @property
    def padded_bytes(self) -> int:
        """The bytes of all slices: `nbytes`, and what the last ones have behind the end."""
        step = self.count * SHARED_ALIGNMENT_BYTES
        return -(-self.nbytes // step) * step

    def own(self, rank: int) -> tuple[int, int]:
        """Returns start and end of the slice of process `rank`, as far as it is in the buffer."""
        size = self.padded_bytes // self.count
        return min(rank * size, self.nbytes), min((rank + 1) * size, self.nbytes)

    def elements(self, tensor: UnitTensor, rank: int) -> list[range]:
        """Returns the ranges of `tensor`, in elements of its flat form, in the slice of process `rank`: one or none.

        The tensor is contiguous in its unit.
        """
        start, end = self.own(rank)
        first, last = max(start, tensor.offset), min(end, tensor.offset + tensor.nbytes)
        size = tensor.dtype.itemsize
        return [range((first - tensor.offset) // size, (last - tensor.offset) // size)] if first < last else []


def slices_of(unit: OffloadUnit, count: int) -> Slices:
    """Returns the slices of a unit among `count` processes."""
    return Slices(unit.nbytes, count)


def cut_for_sharers(parts: CutModel) -> CutModel:
    """Returns `parts` for processes that share the homes: tensors begin where slices may, and buffers stay resident.

    A forward may change a buffer, and each process has its own.
    """
    resident = list(parts.resident)
    for unit in parts.units:
        resident += [(tensor.host, tensor.attributes) for tensor in unit.tensors if tensor.is_buffer]
        kept, unit.tensors = [tensor for tensor in unit.tensors if not tensor.is_buffer], []
        unit.alignment = SHARED_ALIGNMENT_BYTES
        for tensor in kept:
            tensor.offset = unit.nbytes
            unit.tensors.append(tensor)
    units = [unit for unit in parts.units if unit.tensors]
    for index, unit in enumerate(units):
        unit.index = index
    read = [(window.module, [(unit, t) for unit, t in window.read if not t.is_buffer]) for window in parts.windows]
    return CutModel(parts.model, units, [Window(module, tuple(each)) for module, each in read if each], resident)


def check_divisible(unit: OffloadUnit) -> None:
    """Raises ValueError for a unit that processes cannot share.

    That is one in files, or with a parameter that trains and cannot be updated slice by slice.
    """
    if unit.is_fixed:
        raise ValueError(
            f"{unit} has its home in a file (source=mapped), which processes do not share: use source=memory, or"
            f" {OWN_HOMES}"
        )
    for tensor in unit.trained:
        if not tensor.host.is_contiguous():
            raise ValueError(
                f"{tensor.name} has strides {tuple(tensor.host.stride())}, so processes that share it cannot update"
                f" slices of it: make it contiguous, or {OWN_HOMES}"
            )


def updated_elements(units: Sequence[OffloadUnit], count: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns for each of `count` processes, and for each unit, the elements of the ranges of it that it updates."""
    return tuple(
        tuple(
            tuple(len(part) for tensor in unit.trained for part in slices_of(unit, count).elements(tensor, rank))
            for unit in units
        )
        for rank in range(count)
    )


# As large as DDP's. A larger gradient has a bucket of its own.
BUCKET_BYTES = 25 * 2**20
# Gradients begin at multiples of this in a bucket, as tensors do in memory: kernels may add in another order elsewhere.
ALIGNMENT_BYTES = 512


class GradientBucket:
    """Parameters of one dtype, and where their gradients lie in a flat tensor, whose length divides by `count`."""

    def __init__(self, parameters: Sequence[nn.Parameter], count: int):
        self.parameters = list(parameters)
        self.dtype = self.parameters[0].dtype
        step = ALIGNMENT_BYTES // self.dtype.itemsize
        self._starts, end = [], 0
        for parameter in self.parameters:
            self._starts.append(end)
            end += -(-parameter.numel() // step) * step
        self.length = -(-end // (step * count)) * step * count
        # A parameter by itself, whose gradient needs no room behind it.
        self._alone = None
        if len(self.parameters) == 1 and self.parameters[0].numel() % count == 0:
            (self._alone,) = self.parameters
            self.length = self._alone.numel()

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.length

    def flat(self, device: torch.device, in_place: bool = True) -> Tensor:
        """Returns the gradients as a tensor [length] on `device`; that of a bucket of one in its own memory if it can.

        A missing one is minus zero, which changes no sum. `in_place`: the gradients' own memory may be written to.
        """
        if in_place and self._alone is not None and (gradient := self._alone.grad) is not None:
            like = torch.empty_like(self._alone, device="meta")
            if (gradient.device, gradient.dtype, gradient.stride()) == (device, like.dtype, like.stride()):
                return gradient.detach().as_strided((self.length,), (1,))
        flat = torch.empty(self.length, dtype=self.dtype, device=device)
        if self._alone is None or self._alone.grad is None:
            flat.fill_(-0.0)
        pairs = [(view, parameter.grad) for parameter, view in self.views(flat) if parameter.grad is not None]
        if pairs:
            copy_each(*zip(*pairs, strict=True))
        return flat

    def addends(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the places of the gradients in `flat`, and the gradients.

        A parameter that has none gets minus zero, as in `flat()`.
        """
        places, gradients = [], []
        for parameter, view in self.views(flat):
            if parameter.grad is None:
                parameter.grad = torch.full_like(parameter, -0.0)
            places.append(view)
            gradients.append(parameter.grad)
        return places, gradients

    def shares_memory(self) -> bool:
        """Tells whether something else holds memory that a gradient lies in, which backward may still read.

        Autograd gives a parameter that is added to an activation of its shape the gradient of that.
        """
        return any(holders_of_memory(p.grad) > 1 for p in self.parameters if p.grad is not None)

    def spread(self, flat: Tensor) -> None:
        """Gives every parameter its part of `flat` as its gradient; one that has none gets memory for it."""
        with torch.no_grad():
            pairs = []
            for parameter, view in self.views(flat):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                if parameter.grad.data_ptr() != view.data_ptr():
                    pairs.append((parameter.grad, view))
            if pairs:
                copy_each(*zip(*pairs, strict=True))

    def views(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yields each parameter with its part of `flat`, which has the strides that autograd gives its gradient."""
        for parameter, start in zip(self.parameters, self._starts, strict=True):
            strides = torch.empty_like(parameter, device="meta").stride()
            yield parameter, flat.as_strided(parameter.shape, strides, flat.storage_offset() + start)


def separate_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Gives memory of its own to each gradient that lies in the memory of another's: two sums would be added up there.

    Autograd gives the gradients of `a` and `b` one memory where a forward computes `a[None] + b[None]`.
    """
    given = [parameter for parameter in parameters if parameter.grad is not None]
    end = 0
    for parameter in sorted(given, key=lambda parameter: parameter.grad.data_ptr()):
        start = parameter.grad.data_ptr()
        if start < end:
            parameter.grad = parameter.grad.clone()
        else:
            end = start + parameter.grad.numel() * parameter.grad.dtype.itemsize


def gradient_buckets(
    parameters: Sequence[nn.Parameter], count: int = 1, nbytes: int = BUCKET_BYTES
) -> Iterator[GradientBucket]:
    """Yields buckets of at most `nbytes` of the parameters, from the last to the first; one that is larger is alone.

    Backward makes gradients in about that order. `count` processes sum them.
    """
    run: list[nn.Parameter] = []
    taken = 0
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.dtype.itemsize
        if run and (taken + size > nbytes or parameter.dtype != run[0].dtype):
            yield GradientBucket(run, count)
            run, taken = [], 0
        run.append(parameter)
        taken += size
    if run:
        yield GradientBucket(run, count)
