"""Several microbatches in one step: one after another, or side by side, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload.microbatches.lockstep import Lockstep, Threads
from offload.runtime.registry import Streams

# Autograd numbers the nodes of AccumulateGrad highest of all, so that they run as soon as they can.
_LEAVES = 2**63


def one_after_another(
    losses: Sequence[Callable[[], Tensor]], before_last: Callable[[], None] = lambda: None
) -> list[Tensor]:
    """Computes each loss and its gradients before the next. Returns the losses, detached.

    `before_last` is called when the gradients that follow are final.
    """
    values = []
    for number, loss in enumerate(losses, start=1):
        if number == len(losses):
            before_last()
        value = loss()
        value.backward()
        values.append(value.detach())
    return values


class LayerMajor:
    """Sends every microbatch through the same layers before any goes on to the next, forward and backward.

    So weights that stream come in once for all microbatches, and gradients leave once. `enter(place)` is to be called
    where the layers that are in place number `place` begin.
    """

    def __init__(self, streams: Streams):
        self._streams = streams
        self._threads = Threads()
        self._lockstep: Lockstep | None = None

    def enter(self, place: int) -> None:
        """Called in forward: returns when it is this microbatch's turn at `place`. Alone, at once."""
        if self._lockstep is not None:
            self._lockstep.pause(place)

    def accumulate(
        self, losses: Sequence[Callable[[], Tensor]], before_last: Callable[[], None] = lambda: None
    ) -> list[Tensor]:
        """Computes every loss and the gradients of all. Returns the losses, detached, in order.

        `before_last` is called when the gradients that follow are final.

        In backward too the microbatches pass each place in their order, so that gradients are added in the order in
        which they would be one microbatch after another.
        """
        if len(losses) == 1:
            return one_after_another(losses, before_last)
        self._lockstep = Lockstep(losses, self._streams, self._threads)
        try:
            values = self._lockstep.run()
            for index, value in enumerate(values):
                _number(value, self._order(index, len(losses)))
        finally:
            self._lockstep = None
        before_last()
        torch.autograd.backward(values)
        return [value.detach() for value in values]

    def close(self) -> None:
        """Ends the threads of the microbatches."""
        self._threads.close()

    def _order(self, index: int, count: int) -> Callable[[int], int]:
        turn_of = self._lockstep.turn_of
        return lambda number: (turn_of(index, number) * count + count - 1 - index << 32) + number


def _number(loss: Tensor, order: Callable[[int], int]) -> None:
    """Numbers the nodes that lead to `loss` anew.

    Of the nodes that are ready, autograd's engine runs the one numbered highest: as a rule the one recorded last. But
    numbers count by thread, so those of several threads say nothing about each other.
    """
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() < _LEAVES:
            node._set_sequence_nr(order(node._sequence_nr()))
        waiting += [following for following, _ in node.next_functions]
