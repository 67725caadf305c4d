"""Host blocks that are taken and released within a step, and reused from one step to the next."""

from __future__ import annotations

from collections import Counter, OrderedDict

from offload.memory.host_memory import HostArena, HostBlock
from offload.streams.registry import Event, Streams

PAGE_BYTES = 4096
# Left to the rest of the process and of the machine.
RESERVE_BYTES = 2**28
# A block may be larger by this factor than what it is taken for, where lengths vary from step to step.
SLACK = 2
# A block that was not taken for this many steps is returned to the host.
IDLE_STEPS = 8


class PooledBlock:
    """A host block in use: `bytes` is a uint8 tensor of the length that was asked for.

    `used` marks the end of the last copy that read or wrote it, if any; `step` is that in which it was taken last.
    """

    def __init__(self, block: HostBlock):
        self.block = block
        self.bytes = block.bytes
        self.used: Event | None = None
        self.step = 0

    def __str__(self) -> str:
        return str(self.block)


class HostPool:
    """Host blocks of exact size (whole pages), as many as the host has room for.

    A size of which the pool has blocks is served by these only: else steps that are all alike would give blocks to
    other tensors each time. Any other size takes the smallest idle block that fits. `grew`: new memory was page-locked
    in this step. Who takes a block makes the copy that uses it wait for `used`, and sets `used` to the end of that
    copy.
    """

    def __init__(self, arena: HostArena, streams: Streams):
        self.grew = False
        self._arena = arena
        self._streams = streams
        self._step = 0
        # Idle blocks by size, the size that is unused for the longest time first.
        self._idle: OrderedDict[int, list[PooledBlock]] = OrderedDict()
        # The number of blocks by size, idle and taken.
        self._counts: Counter[int] = Counter()

    def take(self, nbytes: int, name: str) -> PooledBlock | None:
        """Returns a block for `nbytes`, or None where the host has no room for one.

        Idle blocks of other sizes are returned to the host first where that makes the room.
        """
        size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        block = self._idle_block(size) or self._new_block(size, name)
        if block is not None:
            block.bytes = block.block.bytes[:nbytes]
            block.step = self._step
        return block

    def release(self, block: PooledBlock) -> None:
        """Makes a taken block idle. Copies that use it may still be queued."""
        size = block.block.bytes.numel()
        self._idle.setdefault(size, []).append(block)
        self._idle.move_to_end(size)

    def idle_blocks(self) -> list[PooledBlock]:
        """Returns the blocks that are not taken."""
        return [block for blocks in self._idle.values() for block in blocks]

    def end_step(self) -> None:
        """Returns the blocks to the host that no step has needed lately: shapes have changed, or less is swapped."""
        self._step += 1
        self.grew = False
        for size in list(self._idle):
            while self._idle.get(size) and self._idle[size][0].step < self._step - IDLE_STEPS:
                self._return_one(size)

    def trim(self) -> None:
        """Returns every idle block to the host."""
        while self._idle:
            self._return_one(next(iter(self._idle)))

    def _idle_block(self, size: int) -> PooledBlock | None:
        fitting = min((idle for idle in self._idle if size <= idle <= SLACK * size), default=None)
        if fitting is None or (fitting != size and self._counts[size]):
            return None
        # The block that was released last is the likeliest to be in the processor's caches. The oldest may go unused.
        return self._pop(fitting, -1)

    def _pop(self, size: int, index: int) -> PooledBlock:
        blocks = self._idle[size]
        block = blocks.pop(index)
        if not blocks:
            del self._idle[size]
        return block

    def _new_block(self, size: int, name: str) -> PooledBlock | None:
        while True:
            try:
                self._arena.require(size + RESERVE_BYTES)
                block = PooledBlock(self._arena.allocate(size, name))
            except MemoryError:
                if not self._idle:
                    return None
                self._return_one(next(iter(self._idle)))
                continue
            self._counts[size] += 1
            self.grew = True
            return block

    def _return_one(self, size: int) -> None:
        """Returns the idle block of `size` that was released first to the host, once no copy uses it."""
        block = self._pop(size, 0)
        if block.used is not None:
            block.used.synchronize()
        self._streams.writes(None, block, "the host's next use of the memory")
        self._arena.release(block.block)
        self._counts[size] -= 1
