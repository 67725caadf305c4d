"""Page-locked host memory in which gradients wait for their updates, where nobody else reads them.

Each gradient lands in a block of it, is read once, by its update, and its memory is then free for another. So host
memory for gradients does not grow with the model.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from time import perf_counter

import torch

from offload.memory.host_memory import HostBlock, aligned
from offload.streams.registry import Signal, Streams
from offload.weights.units.unit import OffloadUnit, UnitTensor

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

    `consumed` is set when the update has read it. Whoever sets it then sets `ended`, which all blocks have in common.
    """

    tensor: torch.Tensor
    start: int
    end: int
    name: str
    ended: threading.Event
    consumed: Signal | None = None

    def __str__(self) -> str:
        return self.name


class GradientRing:
    """Gives out pieces of `memory` wherever it is free, and takes each back when its update has read it.

    A block that is given out belongs to the caller until it is `lent` to an update. Updates are made in the order in
    which the next forward uses their units, so those whose gradients land first may come last, and stay. Were memory
    taken back in the order of landing, all that is free behind them would wait for them, and the device would run dry.
    `wait_ms` is the time that the host has waited.
    """

    def __init__(self, memory: HostBlock, streams: Streams):
        self.wait_ms = 0.0
        self._memory = memory
        self._streams = streams
        self._ended = threading.Event()
        # By their places.
        self._lent: list[RingBlock] = []
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
        self._given = RingBlock(tensor.gradient.over(memory), start, start + nbytes, name, self._ended)
        return self._given

    def lend(self, block: RingBlock, consumed: Signal) -> None:
        """Leaves the newest block to an update, until `consumed` is set."""
        block.consumed, self._given = consumed, None
        insort(self._lent, block, key=attrgetter("start"))

    def _room(self, nbytes: int) -> int | None:
        """Returns the first place with `nbytes` that are not lent; None if there is none."""
        start = 0
        for block in self._lent:
            if start + nbytes <= block.start:
                return start
            # An empty one may lie at the begin of another.
            start = max(start, block.end)
        return start if start + nbytes <= self._memory.bytes.numel() else None

    def _take_back(self) -> None:
        """Takes back what has been read, and blocks the host until that is at least one block."""
        begin = perf_counter()
        self._ended.clear()
        while not (read := [block for block in self._lent if block.consumed.is_set()]):
            self._ended.wait()
            self._ended.clear()
        self.wait_ms += (perf_counter() - begin) * 1e3
        for block in read:
            # Does not block: what follows comes after the update also where threads have clocks.
            block.consumed.wait()
            self._lent.remove(block)
            self._reuse(block)

    def _reuse(self, block: RingBlock) -> None:
        self._streams.writes(self._streams.d2h, block, "the next gradient")
