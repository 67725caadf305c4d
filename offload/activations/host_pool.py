"""Host blocks that come and go within a step, reused from one step to the next."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

from offload.runtime.host_memory import HostArena, HostBlock
from offload.runtime.registry import Event, Streams

PAGE_BYTES = 4096
# Left to the rest of the process and of the machine when nobody gives a budget.
RESERVE_BYTES = 2**28
# A block may be larger by this factor than what it is lent for, where lengths vary from step to step.
SLACK = 2
# A block that was not lent for so many steps is given back.
IDLE_STEPS = 8


class PooledBlock:
    """A host block on loan: `bytes` is uint8, as long as was asked for.

    `used` ends the last copy that read or wrote it; None: there was none. `step` is the pool's step of its last loan.
    """

    def __init__(self, block: HostBlock):
        self.block = block
        self.bytes = block.bytes
        self.used: Event | None = None
        self.step = 0

    def __str__(self) -> str:
        return str(self.block)


class HostPool:
    """Blocks of the arena, made in exact size (whole pages) and at most `budget` bytes of them (None: what is free).

    A size that the pool has blocks of is lent in these, or steps that are all alike would not find each its own. For
    another, the smallest idle block that fits is lent.

    `grew`: new memory was page-locked in this step, which takes longer than many a step.
    Who takes a block and queues a copy into it orders that copy behind `used`, and moves `used` on.
    """

    def __init__(self, arena: HostArena, streams: Streams, budget: int | None = None):
        self.held_bytes = 0
        self.grew = False
        self._arena = arena
        self._streams = streams
        self._budget = budget
        self._step = 0
        # By size, the size longest unused first.
        self._idle: OrderedDict[int, deque[PooledBlock]] = OrderedDict()
        # By size, idle and on loan.
        self._counts: Counter[int] = Counter()

    @property
    def idle_bytes(self) -> int:
        """Bytes of the blocks that are not on loan."""
        return sum(size * len(blocks) for size, blocks in self._idle.items())

    def take(self, nbytes: int, name: str) -> PooledBlock | None:
        """A block for `nbytes`, or None where neither the budget nor the host has room for one.

        Idle blocks of other sizes are given back to the host first where that makes the room.
        """
        size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        block = self._idle_block(size) or self._new_block(size, name)
        if block is not None:
            block.bytes = block.block.bytes[:nbytes]
            block.step = self._step
        return block

    def give_back(self, block: PooledBlock) -> None:
        """Ends a loan. Copies that use the block may still be queued."""
        size = block.block.bytes.numel()
        self._idle.setdefault(size, deque()).append(block)
        self._idle.move_to_end(size)

    def idle_blocks(self) -> list[PooledBlock]:
        """The blocks that are not on loan."""
        return [block for blocks in self._idle.values() for block in blocks]

    def end_step(self) -> None:
        """Gives back what no step has needed lately: shapes have changed, or less is swapped than before."""
        self._step += 1
        self.grew = False
        for size in list(self._idle):
            while self._idle.get(size) and self._idle[size][0].step < self._step - IDLE_STEPS:
                self._release_one(size)

    def trim(self) -> None:
        """Gives every idle block back to the host."""
        while self._idle:
            self._release_one(next(iter(self._idle)))

    def _idle_block(self, size: int) -> PooledBlock | None:
        fitting = min((held for held in self._idle if size <= held <= SLACK * size), default=None)
        if fitting is None or (fitting != size and self._counts[size]):
            return None
        blocks = self._idle[fitting]
        # The one given back last is the likeliest to be in the processor's caches; the oldest can be given up.
        block = blocks.pop()
        if not blocks:
            del self._idle[fitting]
        return block

    def _new_block(self, size: int, name: str) -> PooledBlock | None:
        if self._budget is not None and self.held_bytes - self.idle_bytes + size > self._budget:
            return None
        while self._budget is not None and self.held_bytes + size > self._budget:
            self._release_one(next(iter(self._idle)))
        while True:
            try:
                self._arena.require(size + RESERVE_BYTES)
                block = PooledBlock(self._arena.allocate(size, name))
            except MemoryError:
                if not self._idle:
                    return None
                self._release_one(next(iter(self._idle)))
                continue
            self.held_bytes += size
            self._counts[size] += 1
            self.grew = True
            return block

    def _release_one(self, size: int) -> None:
        blocks = self._idle[size]
        block = blocks.popleft()
        if not blocks:
            del self._idle[size]
        if block.used is not None:
            block.used.synchronize()
        self._streams.writes(None, block, "the host's next use of the memory")
        self._arena.give_back(block.block)
        self.held_bytes -= size
        self._counts[size] -= 1
