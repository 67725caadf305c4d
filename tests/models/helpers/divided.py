"""Rows that several ranks divide, each a thread of one process with its own copy of the model."""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from torch import Tensor, nn

from models.divided_sequence import DividedSequence

PATIENCE_S = 60


class Threads:
    """Connects `count` divided sequences, of which each is used by a thread of its own."""

    def __init__(self, count: int):
        self.sequences = [DividedSequence(count) for _ in range(count)]
        self._sent: list[Tensor | None] = [None] * count
        self._barrier = Barrier(count)
        for rank, sequence in enumerate(self.sequences):
            sequence.connect(rank, lambda received, sent, rank=rank: self._exchange(rank, received, sent))

    def _exchange(self, rank: int, received: Tensor, sent: Tensor) -> None:
        assert sent.is_contiguous()
        assert received.is_contiguous()
        self._sent[rank] = sent
        self._barrier.wait(PATIENCE_S)
        for part, other in zip(received, self._sent, strict=True):
            part.copy_(other[rank])
        self._barrier.wait(PATIENCE_S)


def losses_and_gradients(model: nn.Module, ids: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Each position's loss [rows, length], and the gradients of their sum."""
    losses = model(ids, labels, reduction="none")
    losses.sum().backward()
    # Experts without a token have none.
    return losses.detach(), [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def in_parts(model: nn.Module, ids: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Sequence[Tensor]]:
    """Returns what `losses_and_gradients` does, computed by `count` ranks; their gradients are added."""

    def on_rank(sequence: DividedSequence) -> tuple[Tensor, list[Tensor]]:
        own = copy.deepcopy(model)
        own.divided = sequence
        part = [each.chunk(count, dim=1)[sequence.rank] for each in (ids, labels)]
        return losses_and_gradients(own, *part)

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(on_rank, Threads(count).sequences))
    losses, gradients = zip(*found, strict=True)
    return torch.cat(losses, dim=1), [sum(parts) for parts in zip(*gradients, strict=True)]


def check_in_parts(model: nn.Module, ids: Tensor, labels: Tensor, count: int) -> None:
    """Asserts that ranks compute what one device does, and that positions of other ranks matter."""
    losses, gradients = losses_and_gradients(copy.deepcopy(model), ids, labels)
    found, summed = in_parts(model, ids, labels, count)
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
    for gradient, whole in zip(summed, gradients, strict=True):
        torch.testing.assert_close(gradient, whole, rtol=1e-4, atol=1e-5 * whole.abs().max().item() + 1e-6)
    half = ids.shape[1] // 2
    with torch.no_grad():
        alone = model(ids[:, half:], labels[:, half:], reduction="none")
    assert (alone - losses[:, half:]).abs().max() > 1e-3
