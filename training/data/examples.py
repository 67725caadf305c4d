"""Datasets of numbered examples, such as images: which examples a batch has."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from training.data.packing import epoch_order
from training.errors import UserError


class NumberedExamples(ABC):
    """Batches of examples with the numbers 0 to `count` - 1. Each epoch has them in a new order.

    The last `eval_share` of the numbers are held out: no batch has them. A subclass makes the tensors of given numbers.

    Args:
        count: all examples.
        seed: decides the order.
        batch_size: examples in a batch.
        eval_share: at least 0, at most 0.5.

    Attributes:
        num_blocks: examples in an epoch.

    Raises:
        UserError: there is no example, or `eval_share` is out of range.
    """

    def __init__(self, count: int, *, seed: int, batch_size: int, eval_share: float = 0.0):
        check_share(eval_share)
        self.num_blocks = count - int(count * eval_share)
        if self.num_blocks < 1:
            raise UserError(f"dataset: {count} examples; give at least one")
        self._count = count
        self._seed = seed
        self._batch_size = batch_size

    @abstractmethod
    def examples(self, numbers: Sequence[int], epochs: Sequence[int]) -> dict[str, Tensor]:
        """Returns the tensors of these examples on the CPU: a pure function of numbers and epochs.

        `epochs` has the epoch of each, for variations that change from epoch to epoch; held-out examples have -1.
        """

    def batch(self, index: int) -> dict[str, Tensor]:
        """Returns batch `index` >= 0 on the CPU. Earlier calls do not change it.

        Examples continue from epoch to epoch, so a batch may contain the end of one and the start of the next.
        """
        numbers, epochs = [], []
        for place in range(index * self._batch_size, (index + 1) * self._batch_size):
            epoch, position = divmod(place, self.num_blocks)
            numbers.append(int(epoch_order(self.num_blocks, self._seed, epoch)[position]))
            epochs.append(epoch)
        return self.examples(numbers, epochs)

    def eval_batches(self, count: int) -> list[dict[str, Tensor]]:
        """Returns `count` batches of held-out examples, the same at each call, on the CPU.

        Their numbers are spread evenly. Where there are too few, each is there once: batches are fewer, and the last is
        smaller. Empty if nothing is held out.
        """
        available = self._count - self.num_blocks
        wanted = min(count * self._batch_size, available)
        numbers = [self.num_blocks + place * available // wanted for place in range(wanted)]
        batches = [numbers[start : start + self._batch_size] for start in range(0, wanted, self._batch_size)]
        return [self.examples(batch, [-1] * len(batch)) for batch in batches]


def check_share(eval_share: float) -> None:
    """Raises UserError for a share of held-out examples that is out of range."""
    if not 0 <= eval_share <= 0.5:
        raise UserError(f"dataset.eval_share={eval_share}: must be at least 0 and at most 0.5")
