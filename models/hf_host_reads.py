"""Leaves out what transformers reads back of every batch, in the forwards of `models.hf`.

Without an attention mask, transformers searches the positions for sequences that were packed into one row, and the ids
for padding that it should warn of. The host would wait for the device in every forward, and a forward on the meta
device, which a plan is, would fail. The models here number the positions themselves and get no padding. Some make a
mask of ones themselves, in which transformers looks for a zero: on the meta device there is none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel, masking_utils

# Microbatches may run in threads of their own.
_thread = threading.local()
_search = masking_utils.find_packed_sequence_indices
_all = masking_utils.fast_all


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Makes transformers take each row for one sequence inside the block, in this thread, without looking."""
    before = getattr(_thread, "known", False)
    _thread.known = True
    try:
        yield
    finally:
        _thread.known = before


def _found(position_ids: Tensor) -> Tensor | None:
    return None if getattr(_thread, "known", False) else _search(position_ids)


def _all_true(mask: Tensor) -> bool | Tensor:
    # Values are looked at, where there are any: a model may make its mask of the ids.
    return mask.is_meta or _all(mask)


# The module is changed for good, since threads share it; outside the block, and with values, both do as before.
masking_utils.find_packed_sequence_indices = _found
masking_utils.fast_all = _all_true


def without_padding_warning(model: PreTrainedModel) -> None:
    """Lets a model and those inside it no longer look for padding in the ids."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _no_warning


def _no_warning(*_: object) -> None:
    pass
