"""Converts A and B of experts to the layout that peft stores: of experts in one tensor, and of one that they share.

A is [experts * rank, in]: the rows of the first expert, then those of the second. B is [out, rank * experts]: its first
column of each expert, then the second of each.
"""

import torch
from torch import Tensor


def for_each_expert(one: Tensor, shape: torch.Size) -> Tensor:
    """Returns the A or B that experts share, [rank, in] or [out, rank], as peft's of `shape`, equal for each expert."""
    rows, columns = (whole // own for whole, own in zip(shape, one.shape, strict=True))
    return one.repeat(rows, 1).repeat_interleave(columns, 1)


def of_one_expert(whole: Tensor, shape: torch.Size) -> Tensor | None:
    """Returns the A or B of `shape` that peft's `whole` has for each expert; None if these differ."""
    one = whole[: shape[0], :: whole.shape[1] // shape[1]]
    return one if torch.equal(for_each_expert(one, whole.shape), whole) else None
