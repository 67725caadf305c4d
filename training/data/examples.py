"""Datasets of numbered examples, such as images, and of random numbers: what a batch has."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from training.data.packing import epoch_order, places_of_batch, spread_batches
from training.errors import UserError

# In the key of random numbers: those of evaluation.
EVALUATION = 1


class NumberedExamples(ABC):
    """Batches of examples with the numbers 0 to `count` - 1. Each epoch has them in a new order, which `seed` decides.

    The last `eval_share` of the numbers are held out: no batch has them. An epoch has the other `num_blocks` examples.
    A subclass makes the tensors of given numbers. Raises UserError if there is no example, or `eval_share` is not from
    0 to 0.5.
    """

    def __init__(self, count: int, *, seed: int, batch_size: int, eval_share: float = 0.0):
        check_share(eval_share)
        self.num_blocks = count - int(count * eval_share)
        if self.num_blocks < 1:
            raise UserError(f"dataset: {count} examples; give at least one")
        self._count, self._seed, self._batch_size = count, seed, batch_size

    @abstractmethod
    def examples(self, numbers: Sequence[int], epochs: Sequence[int]) -> dict[str, Tensor]:
        """Returns the tensors of these examples on the CPU: a pure function of their numbers and epochs.

        `epochs` has the epoch of each example, -1 for one that is held out.
        """

    def batch(self, index: int) -> dict[str, Tensor]:
        """Returns batch `index` >= 0 on the CPU. Earlier calls do not change it."""
        places = places_of_batch(index, self._batch_size, self.num_blocks)
        numbers = [int(epoch_order(self.num_blocks, self._seed, epoch)[position]) for epoch, position in places]
        return self.examples(numbers, [epoch for epoch, _ in places])

    def eval_batches(self, count: int) -> list[dict[str, Tensor]]:
        """Returns `count` batches of held-out examples (`spread_batches`) on the CPU, the same at each call."""
        batches = spread_batches(count, self._batch_size, self._count - self.num_blocks)
        return [self.examples([self.num_blocks + n for n in batch], [-1] * len(batch)) for batch in batches]


class RandomBatches(ABC):
    """Batches of random numbers, new ones in each: for measuring speed. The loss means nothing."""

    num_blocks = None

    @abstractmethod
    def _drawn(self, *key: int) -> Any:
        """Returns a batch on the CPU, a pure function of the seed and `key`."""

    def batch(self, index: int) -> Any:
        """Returns batch `index` >= 0 on the CPU."""
        return self._drawn(index)

    def eval_batches(self, count: int) -> list[Any]:
        """Returns `count` batches that `batch` does not have, on the CPU."""
        return [self._drawn(index, EVALUATION) for index in range(count)]


def check_share(eval_share: float) -> None:
    """Raises UserError for a share of held-out examples that is out of range."""
    if not 0 <= eval_share <= 0.5:
        raise UserError(f"dataset.eval_share={eval_share}: must be at least 0 and at most 0.5")
