"""Rows of models of transformers that several ranks divide (`models.divided_sequence`).

The option `divided` of a model's forward reaches its attention as that of packed rows does (`models.hf_packed`), so a
model can do it whose attention takes `packed_starts` in place of all masks, if it has no window.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.divided_sequence import DividedSequence
from models.hf_packed import DIVIDED, Packing, most_packed, one_sequence_a_row, without_padding_warning
from models.hf_source import one_line, same_again


def why_not_divided(model: PreTrainedModel, packing: Packing, count: int) -> str | None:
    """Returns None if `count` ranks can divide the rows of a model, on any device; else a clause that says why not."""
    if most_packed(model) is not None:
        return "what it computes of a position depends on the length of the row"
    if packing.why_not is not None:
        return packing.why_not
    if not packing.by_starts:
        return "its attention is not that of torch (sdpa), or has masks of its own"
    with torch.device("meta"):
        # On the meta device torch multiplies the rows of experts in bf16 alone.
        twin = same_again(model, torch.bfloat16)
        ids = torch.zeros((1, 2), dtype=torch.int64)
    without_padding_warning(twin)
    try:
        with torch.no_grad(), one_sequence_a_row():
            twin.eval()(input_ids=ids, **options_of(DividedSequence(count), ids))
    # Each forward fails in its own way.
    except Exception as error:
        return one_line(error)
    return None


def options_of(divided: DividedSequence, input_ids: Tensor) -> dict[str, Any]:
    """Returns the options of a forward of a part of rows: this rank's positions of `input_ids` [rows, length]."""
    start, length = divided.start(input_ids.shape[1]), input_ids.shape[1]
    positions = torch.arange(start, start + length, device=input_ids.device)
    return {"position_ids": positions[None], DIVIDED: divided}
