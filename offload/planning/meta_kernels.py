"""Attention and RMS norm for meta tensors that save the same tensors for backward as fused kernels do.

On the meta device torch splits both into operations that save much more, attention its whole matrix of scores. A GPU
has kernels for both. The CPU has one for attention without dropout, which saves the same as a GPU's; it splits
attention with dropout, and RMS norm. Products that add to a wider result are here as well: before 2.13 torch has them
on GPUs only. So are the products of experts (`grouped_mm`), which torch has for meta tensors of bf16 alone, and whose
FLOPs it does not count.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.torch_private.tensor_parts import wraps

HALF = (torch.bfloat16, torch.float16)


@contextmanager
def fused_kernels(add_flops: Callable[..., None], on_gpu: bool = True) -> Iterator[None]:
    """Replaces attention of meta tensors inside the block, and with `on_gpu` RMS norm. Other tensors are not affected.

    Attention with dropout is replaced with `on_gpu` alone.

    `add_flops` is called with the FLOPs of attention and this kind: two products in forward and, as is usual, four in
    backward; half of them under a causal mask. For the products of experts it is called with the kind `grouped`: one in
    forward, two in backward.

    Attention raises RuntimeError for shapes that do not fit each other, as torch's does.
    """
    attention, rms_norm, addmm = F.scaled_dot_product_attention, F.rms_norm, torch.addmm
    grouped_mm = F.grouped_mm

    def meta_attention(query, key, value, *others, is_causal=False, **named):
        drops = (others[1] if others[1:] else named.get("dropout_p", 0.0)) > 0
        if not query.is_meta or (drops and not on_gpu):
            return attention(query, key, value, *others, is_causal=is_causal, **named)
        mask = others[0] if others else named.get("attn_mask")
        _check_shapes(query, key, value, mask, named.get("enable_gqa", False))
        if mask is not None and mask.dtype == torch.bool:
            # torch makes numbers to add of it, anew in each call.
            mask = query.new_empty(mask.shape)
        products = 4.0 * query.numel() * key.shape[-2] * (0.5 if is_causal else 1.0)
        return _Attention.apply(query, key, value, mask, products, add_flops, on_gpu)

    def meta_rms_norm(x, normalized_shape, weight=None, eps=None):
        if not x.is_meta or not on_gpu:
            return rms_norm(x, normalized_shape, weight, eps)
        return _RMSNorm.apply(x, weight, len(normalized_shape))

    def meta_addmm(total, a, b, **named):
        if not total.is_meta or named.get("out") is None:
            return addmm(total, a, b, **named)
        add_flops(2.0 * a.numel() * b.shape[-1])
        return named["out"]

    def meta_grouped_mm(rows, weights, **named):
        if not rows.is_meta or rows.ndim != 2 or weights.ndim != 3:
            return grouped_mm(rows, weights, **named)
        return _GroupedProduct.apply(rows, weights, add_flops)

    # In the module, not by a TorchFunctionMode: autograd leaves such modes where backward computes a block again.
    F.scaled_dot_product_attention, F.rms_norm, torch.addmm = meta_attention, meta_rms_norm, meta_addmm
    F.grouped_mm = meta_grouped_mm
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.rms_norm, torch.addmm = attention, rms_norm, addmm
        F.grouped_mm = grouped_mm


class _Attention(torch.autograd.Function):
    """Saves its inputs, its result and the float32 log-sum-exp of each row of scores.

    Backward of a GPU's kernels in half precision sums the gradient of the query in float32, and makes those of keys and
    values that several heads share once for each of them (docs/training.md, "Long sequences").
    """

    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        products: float,
        add_flops: Callable,
        on_gpu: bool,
    ):
        # With the strides of the query, so that heads join again without a copy.
        same = query.shape[-1] == value.shape[-1]
        result = torch.empty_like(query) if same else query.new_empty(*query.shape[:-1], value.shape[-1])
        row_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, row_sums, mask)
        ctx.products, ctx.add_flops, ctx.on_gpu = products, add_flops, on_gpu
        add_flops(products, kind="attention")
        return result

    @staticmethod
    def backward(ctx, grad: Tensor):
        # All stay until the end: of blocks that are computed again nobody else holds them.
        query, key, value, *_, mask = ctx.saved_tensors
        ctx.add_flops(2 * ctx.products, kind="attention")
        scratch = []
        if ctx.on_gpu and mask is None and query.dtype in HALF:
            scratch.append(query.new_empty(query.shape, dtype=torch.float32))
            scratch += [torch.empty_like(query) for _ in range(2) if key.shape[:-2] != query.shape[:-2]]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None, None, None


class _RMSNorm(torch.autograd.Function):
    """Saves its input and the float32 reciprocal of each row's root mean square."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, dims: int):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[: x.ndim - dims], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


class _GroupedProduct(torch.autograd.Function):
    """Multiplies rows [rows, in], sorted by expert, each by the matrix of its expert: weights [experts, in, out]."""

    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, add_flops: Callable):
        ctx.save_for_backward(rows, weights)
        ctx.add_flops = add_flops
        _compute_wrapped(weights)
        add_flops(2.0 * rows.numel() * weights.shape[-1], kind="grouped")
        return rows.new_empty(len(rows), weights.shape[-1])

    @staticmethod
    def backward(ctx, grad: Tensor):
        rows, weights = ctx.saved_tensors
        gradients = []
        for needed, tensor in zip(ctx.needs_input_grad, (rows, weights), strict=False):
            if needed:
                ctx.add_flops(2.0 * rows.numel() * weights.shape[-1], kind="grouped")
            gradients.append(torch.empty_like(tensor) if needed else None)
        if ctx.needs_input_grad[0]:
            _compute_wrapped(weights)
        return *gradients, None


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grouped: bool) -> None:
    """Raises RuntimeError where torch's attention would, because the shapes of its arguments do not fit each other."""
    heads = query.shape[:-2]
    if grouped and query.ndim > 2 and heads[-1] % key.shape[-3] == 0 and key.shape[-3] == value.shape[-3]:
        heads = (*heads[:-1], key.shape[-3])
    if query.shape[-1] != key.shape[-1]:
        shapes = f"{list(query.shape)} and {list(key.shape)}"
        raise RuntimeError(f"attention: the shapes of query and key do not fit each other: {shapes}")
    torch.broadcast_shapes(heads, key.shape[:-2], value.shape[:-2])
    if mask is not None:
        torch.broadcast_shapes(mask.shape, (*query.shape[:-1], key.shape[-2]))


def _compute_wrapped(weights: Tensor) -> None:
    """Makes a tensor that wraps others compute the matrix that it stands for, as a product of it would."""
    if wraps(weights):
        # Any operation does: this one makes nothing besides.
        weights.expand_as(weights)
