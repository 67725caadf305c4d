"""Leaves out what transformers reads back of every batch, in the forwards of `models.hf`.

Without an attention mask, transformers searches the positions for sequences that were packed into one row, and the ids
for padding that it should warn of. The host would wait for the device in every forward, and a forward on the meta
device, which a plan is, would fail. The models here number the positions themselves and get no padding. Some make a
mask of ones themselves, in which transformers looks for a zero: on the meta device there is none.

Where rows are packed, the models here know the sequences of each, and tell them in place of what would be found: every
kind of attention that takes transformers' masks is then bounded by them.
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
    with _known(Sequences(None)):
        yield


@contextmanager
def packed_rows(segments: Tensor, by_starts: bool = False) -> Iterator[Sequences]:
    """Makes transformers take rows [rows, seq_len] for the sequences that `segments` numbers, inside the block."""
    with _known(Sequences(segments, by_starts)) as sequences:
        yield sequences


def known_sequences() -> Sequences | None:
    """Returns what is known in this thread, inside one of the blocks."""
    return getattr(_thread, "sequences", None)


class Sequences:
    """What is known of the sequences in rows.

    Attributes:
        segments: int64 [rows, seq_len], the number of the sequence of each token; None for one sequence a row.
        by_starts: whether attention is given where they begin, and needs no masks.
        asked: for how many masks they were asked for.
        told: whether they were asked for the mask that is made next.
        watched: for each call of attention whether it could do with the starts alone; None where nobody looks.
    """

    def __init__(self, segments: Tensor | None, by_starts: bool = False):
        self.segments = segments
        self.by_starts = by_starts
        self.asked = 0
        self.told = False
        self.watched: list[bool] | None = None


@contextmanager
def _known(sequences: Sequences) -> Iterator[Sequences]:
    before = known_sequences()
    _thread.sequences = sequences
    try:
        yield sequences
    finally:
        _thread.sequences = before


def _found(position_ids: Tensor) -> Tensor | None:
    sequences = known_sequences()
    if sequences is None:
        return _search(position_ids)
    sequences.asked += 1
    sequences.told = True
    return sequences.segments


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
