"""Attention in packed rows: several samples stand in one row one after another, and none sees another.

On GPUs in bf16 and fp16 it is FlashAttention's kernel for sequences of any length (`varlen_attn` of torch; Dao 2023),
which reads where each sample begins and never stores what sees what. It must be told the number of samples, and the
host does not wait for a GPU to count them: they are counted on the CPU (`starts_in`). FlexAttention needs no count,
but it would have to be compiled inside each mode's hooks. Elsewhere, and where nobody counted, a boolean mask
[rows, 1, seq_len, seq_len] is made once for all layers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention_kernels import HALF, causal_kernel

# Sizes of a head that FlashAttention's kernel has.
LARGEST_HEAD = 256
# Tokens of a row from which on a mask of all their pairs is worth doing without.
LONG = 8192


class Packed(NamedTuple):
    """Given to a layer for packed rows; without it rows are not packed. `bounds` is what `bounds_of` returns."""

    bounds: Tensor | None


def positions_in(segments: Tensor) -> Tensor:
    """Returns the position of each token in its sample, int64 [rows, seq_len], for segments [rows, seq_len].

    Padding (-1) counts as one more sample.
    """
    places = torch.arange(segments.shape[1], device=segments.device)
    return places - places.where(_begins(segments), 0).cummax(dim=1).values


def starts_in(segments: Tensor) -> Tensor:
    """Returns where the samples of all rows begin, and after them the number of tokens, as FlashAttention takes it.

    A copy of the segments on a GPU needs it as its attribute `starts`, there as well.

    Args:
        segments: int64 [rows, seq_len] on the CPU.

    Returns:
        int32 [samples + 1], in the rows laid end to end; the padding of a row counts as one more sample.
    """
    begins = _begins(segments).flatten().nonzero().flatten()
    return torch.cat([begins, begins.new_tensor([segments.numel()])]).int()


def bounds_of(segments: Tensor, hidden: Tensor) -> Tensor | None:
    """Returns what `packed_attention` takes in every layer of a forward.

    Args:
        segments: int64 [rows, seq_len]: the number of the sample in its row, -1 for padding at the end.
        hidden: of the dtype and on the device of the queries.

    Returns:
        int32 [samples + 1], where each sample begins in the rows laid end to end; or bool [rows, 1, seq_len, seq_len],
        true where a position (third dimension) sees another; or None on the meta device, where a kernel without a mask
        is stood for by plain causal attention.
    """
    if hidden.dtype in HALF:
        if hidden.is_meta:
            return None
        starts = getattr(segments, "starts", None)
        if hidden.is_cuda and starts is not None:
            return starts
    # Samples stand in order, so those of one number are one sample.
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return same.tril_()


def packed_attention(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None) -> Tensor:
    """Returns causal attention within each sample.

    Args:
        query: [rows, heads, seq_len, head_dim].
        key, value: the same, or with fewer heads, each for a group of query heads.
        bounds: from `bounds_of`.

    Returns:
        [rows, heads, seq_len, head_dim].
    """
    if bounds is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    if bounds.dtype == torch.bool:
        group = query.shape[1] // key.shape[1]
        if group > 1:
            # No fused kernel takes both a mask and fewer heads of keys.
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bounds)
    return attention_by_starts(query, key, value, bounds)


def attention_by_starts(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Returns what `packed_attention` does, by FlashAttention's kernel. CUDA, bf16 or fp16.

    Rows of one sample each are those of a model that packs nothing, and have its kernel, which may be faster.
    `window` is the number of tokens that each sees, itself included; None for all earlier ones of its sample.
    """
    rows, _, seq_len, _ = query.shape
    if window is None and len(starts) == rows + 1:
        with causal_kernel(query, key, value):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    seen = (-1 if window is None else window - 1, 0)
    # No sample is longer than a row.
    context = _kernel()(query, key, value, starts, starts, seq_len, seq_len, scale=scale, window_size=seen)
    return context.unflatten(0, (rows, seq_len)).transpose(1, 2)


@functools.cache
def _kernel() -> Callable[..., Tensor]:
    # Not at the top: with it comes torch's compiler, which takes seconds.
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer heads of keys without being told.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return functools.partial(varlen_attn, **grouped)


def has_kernel(query: Tensor, value: Tensor) -> bool:
    """Tells whether `attention_by_starts` computes attention of these, [rows, heads, seq_len, head_dim].

    On the meta device it tells that of a GPU.
    """
    fits = query.shape[-1] == value.shape[-1] <= LARGEST_HEAD and query.shape[-1] % 8 == 0
    return (query.is_cuda or query.is_meta) and query.dtype in HALF and fits


def _begins(segments: Tensor) -> Tensor:
    """Returns bool [rows, seq_len], true at the first token of each sample."""
    others = segments[:, 1:] != segments[:, :-1]
    return F.pad(others, (1, 0), value=True)
