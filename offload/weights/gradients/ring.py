"""A ring of page-locked host memory in which gradients wait for their updates, where nobody else reads them.

Gradients land in it one behind the other, each is read once, by its update, and its memory is then free for the next.
So host memory for gradients does not grow with the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from offload.memory.host_memory import HostBlock, aligned
from offload.streams.registry import Signal, Streams
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor

# The ring has room for the gradients of this many of the largest units: one is computed, one lands, one is updated, and
# one is between these.
RING_UNITS = 4
# The least size, for small units: backward is queued no further ahead of the device than the ring has room.
LEAST_RING_BYTES = 256 * 2**20


def gradient_ring_bytes(units: Sequence[OffloadUnit]) -> int:
    """Returns the size of the ring for the gradients of `units`: at most that of all of them."""
    sizes = [unit.gradient_bytes for unit in units]
    return min(max(RING_UNITS * max(sizes, default=0), LEAST_RING_BYTES), sum(sizes))


@dataclass(eq=False)
class RingBlock:
    """The bytes `start` to `end` of the ring, which hold one gradient. `tensor` has the parameter's shape and dtype.

    `consumed` is set when the update has read it. `is_wanted`: the host waits for that, so backward stands still.
    """

    tensor: torch.Tensor
    start: int
    end: int
    name: str
    consumed: Signal | None = None
    is_wanted: bool = False

    def __str__(self) -> str:
        return self.name


class GradientRing:
    """Gives out `memory` in the order in which gradients land, and takes it back in that order.

    A block that is given out belongs to the caller until it is `lent` to an update. Updates may end in any order: the
    memory of one that ends early is free when those of older blocks have ended too. So the block that the host waits
    for `is_wanted`, and is updated before newer ones, which make no room: the device would run dry meanwhile. `wait_ms`
    is the time that the host has waited.
    """

    def __init__(self, memory: HostBlock, streams: Streams):
        self.wait_ms = 0.0
        self._memory = memory
        self._streams = streams
        self._lent: deque[RingBlock] = deque()
        # The newest block, as long as it is not lent.
        self._given: RingBlock | None = None

    def block(self, tensor: UnitTensor) -> RingBlock:
        """Returns memory for the gradient of `tensor`, which the d2h stream may write.

        Blocks the host until there is room. That ends: the updates in its way need nothing that is not queued yet.
        """
        nbytes = aligned(tensor.nbytes)
        if self._given is not None:
            # Nobody took it: there was no update, or an exception came before.
            self._reuse(self._given)
        while (start := self._room(nbytes)) is None:
            self._take_back()
        memory = self._memory.piece(start, tensor.nbytes)
        name = f"gradient of {tensor.name} in the ring"
        self._given = RingBlock(tensor.gradient.over(memory), start, start + nbytes, name)
        return self._given

    def lend(self, block: RingBlock, consumed: Signal) -> None:
        """Leaves the newest block to an update, until `consumed` is set."""
        block.consumed, self._given = consumed, None
        self._lent.append(block)

    def _room(self, nbytes: int) -> int | None:
        """Returns the start of `nbytes` behind the newest block, or at the beginning; None if it is lent."""
        if not self._lent:
            return 0
        oldest, newest = self._lent[0].start, self._lent[-1].end
        if newest <= oldest:
            return newest if newest + nbytes <= oldest else None
        if newest + nbytes <= self._memory.bytes.numel():
            return newest
        return 0 if nbytes <= oldest else None

    def _take_back(self) -> None:
        oldest, start = self._lent.popleft(), perf_counter()
        oldest.is_wanted = True
        oldest.consumed.wait()
        self.wait_ms += (perf_counter() - start) * 1e3
        self._reuse(oldest)

    def _reuse(self, block: RingBlock) -> None:
        self._streams.writes(self._streams.d2h, block, "the next gradient")
