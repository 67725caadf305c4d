"""Gradients in flat buckets, each of which processes sum at once, as those of PyTorch DDP (Li et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from offload.torch_private.torch_internals import copy_each, holders_of_memory

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

        Where a parameter has none it is minus zero, which changes no sum, not even the sign of a zero. `in_place`: the
        gradients' own memory may be written to.
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
        """Tells whether something else holds memory that a gradient lies in.

        Autograd gives a parameter that is added to an activation of its shape the gradient of that activation, which
        backward may still read.
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
