"""The loss on the held-out split, between steps: under the run's offload mode, and without a trace in its training."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from time import perf_counter
from typing import Self

import torch
from omegaconf import DictConfig
from torch import nn

from offload import Streams
from training.batches import Batch, add_to_digest, refuse_padding, split_by, uploaded
from training.config.schema import due
from training.errors import UserError
from training.parallel.ranks import ALONE, Ranks
from training.parallel.sequence import pieces_of
from training.seeds import seed_of
from training.tasks.task import Task

# In the key of random numbers: those of an evaluation.
EVALUATION = "evaluation"


PartScores = tuple[int, dict[str, float]]
"""the weight of a part, and its scores, means over it; no scores where that is 0"""


@dataclass(frozen=True)
class Evaluation:
    """The evaluations of a run, each on the same `batches` on the CPU, of at most batch_size examples; () for none."""

    config: DictConfig
    task: Task
    batches: tuple[Batch, ...]

    @classmethod
    def of(cls, config: DictConfig, task: Task, dataset: object) -> Self:
        """Takes the held-out batches of `dataset`. Raises UserError if the run evaluates and no example has a label."""
        every, count = config.eval.every, config.eval.batches
        if every is None:
            return cls(config, task, ())
        if not hasattr(dataset, "eval_batches"):
            raise UserError(
                f"eval.every={every}: {type(dataset).__name__} has no held-out split: give it a method eval_batches, as"
                " CONTRIBUTING.md describes it, or take eval.every=null"
            )
        batches = tuple(dataset.eval_batches(count))
        # A dataset of samples, or of a stream of text, which has to be longer than a sequence.
        if not batches and (task.unit != "tokens" or hasattr(dataset, "meta_tokens")):
            raise UserError(
                f"eval.every={every}: no example is held out: give a larger dataset.eval_share (it is"
                f" {config.dataset.get('eval_share')}), or eval.every=null"
            )
        if not batches:
            raise UserError(
                f"eval.every={every}: the held-out text is too short for a sequence of seq_len={config.seq_len}: give"
                f" more text, a larger dataset.eval_share (it is {config.dataset.get('eval_share')}), a smaller"
                " seq_len, or eval.every=null"
            )
        if not any(task.weight(part) for part in prepared_parts(task, batches, config.batch_size, config.seed)):
            raise UserError(
                f"eval.every={every}: nothing in the {len(batches)} held-out batches has a label: hold out other"
                f" examples, give more than eval.batches={count}, or eval.every=null"
            )
        return cls(config, task, batches)

    def due(self, step: int) -> bool:
        """Tells whether to evaluate after `step` steps: every `eval.every`, from 0, and after the last."""
        return due(self.config.eval.every, step, self.config.steps)

    @cached_property
    def sha256(self) -> str | None:
        """The SHA-256 of the batches; None if there are none."""
        if not self.batches:
            return None
        digest = hashlib.sha256()
        for batch in self.batches:
            add_to_digest(digest, batch)
        return digest.hexdigest()

    def metrics(
        self, model: nn.Module, streams: Streams, stopped: Callable[[], bool], ranks: Ranks = ALONE, alone: bool = False
    ) -> dict[str, float]:
        """Returns the scores, equal bit for bit on any number of ranks, and the time in ms; {} once `stopped`.

        With `alone` this rank computes all parts itself. Raises UserError for texts padded without a mask.
        """
        streams.synchronize()
        start = perf_counter()
        # The largest microbatch of a step: a forward without its gradients needs no more memory than that step.
        sequence = self.config.parallel.sequence
        rows = -(-self.config.batch_size // (self.config.microbatches * (ranks.count // sequence)))
        seed = self.config.seed
        parts = prepared_parts(self.task, self.batches, rows, seed)
        if sequence > 1:
            # In their order each rank gets its piece of each. A rank that stopped would leave the others in a forward.
            parts, stopped = [piece for part in parts for piece in pieces_of(part, sequence)], lambda: False
        for part in parts:
            refuse_padding(model, part, "evaluation")
        scores_of = partial(scores_of_parts, self.task, model, seed=seed, device=streams.device, stopped=stopped)
        scores = mean_scores((ALONE if alone else ranks).evaluate(parts, scores_of, "evaluate"))
        if scores is None:
            return {}
        return {f"eval/{name}": score for name, score in scores.items()} | {"eval/ms": (perf_counter() - start) * 1e3}


def prepared_parts(task: Task, batches: Sequence[Batch], rows: int, seed: int) -> list[Batch]:
    """Returns the batches as the task prepares them, in parts of `rows` examples."""
    return [
        part
        for number, batch in enumerate(batches)
        for part in split_by(task.prepared(batch, seed_of(seed, EVALUATION, number)), rows)
    ]


def scores_of_parts(
    task: Task, model: nn.Module, parts: Sequence[Batch], seed: int, device: torch.device, stopped: Callable[[], bool]
) -> list[PartScores] | None:
    """Returns the weight and the scores of each part; None as soon as `stopped` returns True, asked before each part.

    It computes no gradients. Afterwards random generators, training modes and gradients are as they were before.
    """
    found = []
    with observed(model, seed, device):
        for part in parts:
            if stopped():
                return None
            weight = task.weight(part)
            # The mean score of a part without a label may be 0/0. Of a row that ranks divide all compute theirs.
            computes = weight or getattr(model, "divided", None) is not None
            scores = task.scores(model, uploaded(part, device)) if computes else {}
            found.append((weight, {name: score.item() for name, score in scores.items()}))
    return found


def mean_scores(parts: Sequence[PartScores] | None) -> dict[str, float] | None:
    """Returns the means of the scores of parts over all their weights; None for None."""
    if parts is None:
        return None
    totals: dict[str, float] = {}
    for weight, scores in parts:
        for name, score in scores.items():
            totals[name] = totals.get(name, 0.0) + score * weight
    whole = sum(weight for weight, _ in parts)
    return {name: total / whole for name, total in totals.items()}


@contextmanager
def observed(model: nn.Module, seed: int, device: torch.device) -> Iterator[None]:
    """Puts the model into eval() for the block, without gradients; random numbers depend on `seed` alone.

    Afterwards random generators and the training modes of modules are as they were before.
    """
    generators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(generators), evaluating(model), torch.no_grad():
        torch.manual_seed(seed)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into eval() inside the block; afterwards each module is in the mode in which it was."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
