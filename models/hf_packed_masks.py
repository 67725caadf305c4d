"""Bounds masks of transformers by the sequences of packed rows where transformers does not do so itself.

It looks for the sequences only where it is given positions and no mask. Some models give it no positions for their
masks (GPT-OSS, Falcon), others a mask of ones (OPT, BERT).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, packed_sequence_mask_function

from models.hf_host_reads import known_sequences


def _bounded(make: Callable[..., Tensor | None], *arguments: Any, **options: Any) -> Tensor | None:
    sequences = known_sequences()
    if sequences is None or sequences.segments is None:
        return make(*arguments, **options)
    told, sequences.told = sequences.told, False
    if not told:
        if getattr(options["config"], "attention_chunk_size", None) is not None:
            raise ValueError("chunks of attention begin anew in each sample, but the model gives no positions")
        sequences.asked += 1
        within = packed_sequence_mask_function(sequences.segments)
        options |= {"mask_function": and_masks(within, options["mask_function"]), "allow_is_causal_skip": False}
    return make(*arguments, **options)


# Registered for good, since threads share them; outside forwards of packed rows they do as before.
for _kind in ("sdpa", "eager"):
    ALL_MASK_ATTENTION_FUNCTIONS.register(_kind, partial(_bounded, ALL_MASK_ATTENTION_FUNCTIONS[_kind]))
