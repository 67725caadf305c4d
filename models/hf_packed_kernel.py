"""Runs FlashAttention's kernel on packed rows in models of transformers whose attention is "sdpa".

With a mask of packed rows torch has no kernel that leaves out what a mask hides: on long rows it takes several times as
long. transformers hands options of a model's forward down to its attention; the option `packed_starts` says where the
samples begin, and replaces the mask. It is an argument of every layer, so a layer that is computed again in backward
has it as well. `models.hf_packed` finds out which models hand it to all of their layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models import hf_packed_masks  # noqa: F401  registers the masks that are replaced here
from models.hf_host_reads import known_sequences
from models.packed_attention import HALF, attention_by_starts, has_kernel

STARTS = "packed_starts"
SDPA = "sdpa"
# What the kernel does not compute, with the values under which it need not.
UNLIKE = {"dropout": (0.0,), "is_causal": (None, True), "position_bias": (None,), "softcap": (None,), "s_aux": (None,)}
_attention = ALL_ATTENTION_FUNCTIONS[SDPA]
_mask = ALL_MASK_ATTENTION_FUNCTIONS[SDPA]


def starts_for(segments: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Returns `packed_starts` for a forward in `dtype`, where the kernel is to run; on the meta device a stand-in."""
    if dtype not in HALF or not (segments.is_cuda or segments.is_meta):
        return None
    return segments.new_empty(2, dtype=torch.int32) if segments.is_meta else getattr(segments, "starts", None)


def mask_of(starts: Tensor, rows: int, seq_len: int, window: int | None) -> Tensor:
    """Returns the mask that `starts` stands for: bool [rows, 1, seq_len, seq_len]."""
    places = torch.arange(rows * seq_len, device=starts.device, dtype=torch.int32)
    samples = torch.searchsorted(starts, places, right=True).view(rows, seq_len)
    mask = (samples[:, None, :, None] == samples[:, None, None, :]).tril_()
    return mask if window is None else mask.triu_(1 - window)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    starts = options.pop(STARTS, None)
    sequences = known_sequences()
    window = options.get("sliding_window")
    plain = all(options.get(name, usual[0]) in usual for name, usual in UNLIKE.items())
    if sequences is not None and sequences.watched is not None:
        alike = getattr(attention_mask, "window", False) == window and query.shape[2] == key.shape[2]
        sequences.watched.append(starts is not None and alike and plain)
    if starts is None:
        return _attention(module, query, key, value, attention_mask, **options)
    if plain and has_kernel(query, value):
        context = attention_by_starts(query, key, value, starts, options.get("scaling"), window)
        return context.transpose(1, 2), None
    # A plan has no kernel, and saves under plain attention what the kernel saves.
    mask = None if query.is_meta else mask_of(starts, len(query), query.shape[2], window)
    return _attention(module, query, key, value, mask, **options)


def _make_mask(*arguments: Any, **options: Any) -> Tensor | None:
    sequences = known_sequences()
    if sequences is not None and sequences.by_starts:
        sequences.told = False
        return None
    mask = _mask(*arguments, **options)
    if sequences is not None and sequences.watched is not None and mask is not None and not options.get("use_vmap"):
        mask.window = options.get("local_size")
    return mask


# Registered for good, since threads share them; without the option, and outside forwards of packed rows, both do as
# before.
ALL_ATTENTION_FUNCTIONS.register(SDPA, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(SDPA, _make_mask)
