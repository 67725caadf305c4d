"""Sequences that the ranks of a run divide: each computes a part of the positions of all sequences of a step.

See `models.divided_sequence` for what the ranks exchange inside a forward. All else is data parallelism: each has the
loss of its own labels, weighted by its part of those of the step, and gradients are summed over the ranks.
"""

from collections.abc import Callable

import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from models.divided_sequence import DividedSequence
from models.loss import IGNORED_LABEL
from training.batches import Batch, split_into
from training.errors import UserError
from training.parallel.ranks import Share
from training.tasks.causal_lm import CausalLM
from training.tasks.task import Task


def divide(config: DictConfig, model: nn.Module, task: Task) -> None:
    """Makes `model` take this rank's part of rows, if the ranks are to divide them (parallel.sequence).

    Raises UserError for a run that cannot. The other ranks are connected later, by `Ranks.join_sequence`.
    """
    count = config.parallel.sequence
    if count == 1:
        return
    key = f"parallel.sequence={count}"
    if type(task) is not CausalLM:
        raise UserError(f"{key}: divides the rows of task=causal_lm alone: take parallel.sequence=1")
    if config.dataset.get("packed"):
        raise UserError(f"{key}: packed rows are not divided: take dataset.packed=false, or parallel.sequence=1")
    if config.sample.every is not None:
        raise UserError(
            f"sample.every={config.sample.every} with {key}: ranks that divide rows generate no text: take"
            " sample.every=null, and scripts/generate.py on a checkpoint"
        )
    if config.ema is not None:
        raise UserError(
            f"ema={config.ema:g} with {key}: rank 0 alone has the averages, and evaluates alone: take ema=null"
        )
    if config.seq_len % count:
        raise UserError(
            f"seq_len={config.seq_len}: must be a multiple of {key}: take {config.seq_len // count * count or count}"
        )
    if not hasattr(model, "why_not_divided"):
        raise UserError(f"{key}: {type(model).__name__} computes whole rows alone: take parallel.sequence=1")
    if (why := model.why_not_divided(count)) is not None:
        raise UserError(f"{key}: the model's rows cannot be divided, because {why}: take parallel.sequence=1")
    model.divided = DividedSequence(count)


def pieces_of(batch: Batch, count: int) -> list[Batch]:
    """Splits rows of text, on any device, into `count` runs of positions of the same length.

    A batch is one of `CausalLM` that is not packed; the pieces have `input_ids` and `labels`, int64 [rows, length], and
    `lengths` where the batch has them: how many positions of a row are tokens. Rows whose length `count` does not
    divide get padding without labels at the end, which no other position sees.
    """
    if isinstance(batch, Tensor):
        ids, labels = batch[:, :-1], batch[:, 1:]
    else:
        ids, labels = batch["input_ids"], batch["labels"]
    missing = -ids.shape[1] % count
    ids, labels = F.pad(ids, (0, missing)), F.pad(labels, (0, missing), value=IGNORED_LABEL)
    pairs = zip(ids.chunk(count, dim=1), labels.chunk(count, dim=1), strict=True)
    pieces = [{"input_ids": own.contiguous(), "labels": next_ones.contiguous()} for own, next_ones in pairs]
    if isinstance(batch, dict) and "lengths" in batch:
        length = ids.shape[1] // count
        for rank, piece in enumerate(pieces):
            piece["lengths"] = (batch["lengths"] - rank * length).clamp(0, length)
    return pieces


def shares_of_rows(batch: Batch, ranks: int, microbatches: int, weight: Callable[[Batch], int]) -> list[Share]:
    """Splits the batch of a step, on the CPU, into a share for each rank: its positions of all rows.

    A piece without labels is computed too, because others read its keys and values: the loss of causal_lm is 0 then.
    """
    pieces = [pieces_of(part, ranks) for part in split_into(batch, microbatches)]
    shares = list(zip(*pieces, strict=True))
    weights = [tuple(map(weight, parts)) for parts in shares]
    total = sum(map(sum, weights))
    # Each has random numbers of its own for its dropout.
    firsts = range(0, ranks * microbatches, microbatches)
    return [Share(parts, own, total, first) for parts, own, first in zip(shares, weights, firsts, strict=True)]
