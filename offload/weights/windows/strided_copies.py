"""Copies a tensor with its strides: kernels choose by the strides of their input how they round."""

from __future__ import annotations

import torch

from offload.torch_private.torch_internals import negated_view


def copied_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the values and strides of `tensor`, through which gradients flow.

    The copy of a view that stands for conjugate or negative numbers is such a view, too: kernels resolve it first.
    """
    if tensor.is_conj():
        return copied_with_strides(tensor.conj()).conj()
    if tensor.is_neg():
        return negated_view(copied_with_strides(negated_view(tensor)))
    copy = tensor.clone()
    return copy if copy.stride() == tensor.stride() or not tensor.numel() else _CopyOfStrided.apply(tensor)


class _CopyOfStrided(torch.autograd.Function):
    """Copies a tensor with gaps between its elements, or elements in the same place, with what is between them."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.as_strided((last + 1,), (1,)).clone().as_strided(tensor.shape, tensor.stride())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
