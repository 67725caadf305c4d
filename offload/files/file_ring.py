"""A ring of host blocks that threads fill from files, ahead of the copies to the device that read them.

[Note: the life of a block]

1. Free. `copied` ends the last copy that read it, if any.
2. Filling. It is given to a `ReadPlan`, and threads read its parts: each waits for `copied` before it writes, and sets
   a signal behind it.
3. Taken. The host has waited for the signals of all parts, and queues copies that read the block.
4. Given back. `copied` is recorded behind these copies, and the block is free.

The caller tells which plans it will take next, and in which order (`expect`); of these as many are read ahead as there
are blocks. A plan that nobody expected is read when it is taken, in the place of the one that is needed last.
"""

from __future__ import annotations

import errno
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from time import perf_counter

from offload.files.mapped_files import DIRECT_BYTES, FileSpan, MappedFile
from offload.memory.host_memory import HostArena, HostBlock
from offload.streams.registry import Event, Signal, Streams

# Bytes that a thread reads at a time: enough for a disk's full rate, and few enough to share a unit among threads.
PART_BYTES = 8 * 2**20
# Threads that read parts at a time.
THREADS = 4


@dataclass(frozen=True)
class _Read:
    """Bytes of a file, for `position` in a block. `needed` of the `nbytes` are there for sure: a file may end first."""

    path: Path
    offset: int
    position: int
    nbytes: int
    needed: int


class ReadPlan:
    """Reads that bring `spans` into one block, whole disk blocks at a time. Spans that touch are one read.

    `places` are the positions of the spans in the block, in their order; `nbytes` is the room that they take there.
    """

    def __init__(self, name: str, spans: Sequence[FileSpan]):
        self.name = name
        self.places = [0] * len(spans)
        self.nbytes = 0
        # Of each read: path, first byte in the file, position in the block, end in the file, and end of what is needed.
        extents: list[list] = []
        for index in sorted(range(len(spans)), key=lambda index: (str(spans[index].path), spans[index].offset)):
            span = spans[index]
            begin, needed = span.offset - span.offset % DIRECT_BYTES, span.offset + span.nbytes
            end = -(-needed // DIRECT_BYTES) * DIRECT_BYTES
            last = extents[-1] if extents else None
            if last is None or last[0] != span.path or begin > last[3]:
                extents.append(last := [span.path, begin, self.nbytes, begin, begin])
            last[3], last[4] = max(last[3], end), max(last[4], needed)
            self.nbytes = last[2] + last[3] - last[1]
            self.places[index] = last[2] + span.offset - last[1]
        self.parts: list[list[_Read]] = [[] for _ in range(-(-self.nbytes // PART_BYTES))]
        for path, begin, position, end, needed in extents:
            while begin < end:
                part = position // PART_BYTES
                nbytes = min(end - begin, (part + 1) * PART_BYTES - position)
                self.parts[part].append(_Read(path, begin, position, nbytes, min(nbytes, needed - begin)))
                begin, position = begin + nbytes, position + nbytes

    def __str__(self) -> str:
        return self.name


@dataclass(eq=False)
class _Part:
    """A piece of a block that one thread fills."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(eq=False)
class _Block:
    memory: HostBlock
    parts: list[_Part]
    copied: Event | None = None
    fill: Fill | None = None


@dataclass(eq=False)
class Fill:
    """A block that has the bytes of a plan, or will have them: of each part, what is set once it is read.

    `waiting` are the parts that nobody has begun: who takes one out of it reads it, or takes it back.
    """

    plan: ReadPlan
    block: _Block
    done: list[Signal]
    waiting: set[int] = field(init=False)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.waiting = set(range(len(self.done)))

    @property
    def memory(self) -> HostBlock:
        return self.block.memory

    @property
    def is_read(self) -> bool:
        return all(signal.is_set() for signal in self.done)

    @property
    def is_idle(self) -> bool:
        """True if no thread reads it now: none has begun, or all parts are read."""
        return len(self.waiting) == len(self.done) or self.is_read

    def takes(self, index: int) -> bool:
        """Takes a part out of those that wait; False if somebody has done so before."""
        try:
            self.waiting.remove(index)
        except KeyError:
            return False
        return True


Tasks = SimpleQueue[tuple[Fill, int] | None]
"""parts to read, in their order; None ends a thread"""


class FileRing:
    """Reads plans into `count` blocks of `block_bytes`, which `arena` provides.

    `files` are the files of all plans. `direct` reads past the page cache where that is possible. On the meta device
    nothing is read. `wait_ms` is the time that the host has waited for reads.
    """

    def __init__(
        self,
        files: Mapping[Path, MappedFile],
        arena: HostArena,
        streams: Streams,
        *,
        block_bytes: int,
        count: int,
        direct: bool = False,
    ):
        self.wait_ms = 0.0
        self._streams = streams
        self._blocks = []
        for index in range(count):
            memory = arena.allocate(block_bytes, f"ring block {index}")
            names = (f"part {part} of ring block {index}" for part in range(-(-block_bytes // PART_BYTES)))
            self._blocks.append(_Block(memory, [_Part(name) for name in names]))
        self._fills: dict[ReadPlan, Fill] = {}
        # Of the plans that are expected, the order.
        self._order: dict[ReadPlan, int] = {}
        self._tasks: Tasks = SimpleQueue()
        self._reader = _PartReader(files, streams, direct)
        # Threads hold the queue and not this object: they end when it is dropped, and when the process ends.
        arguments = self._tasks, self._reader, streams
        self._threads = [
            threading.Thread(target=_work, args=(*arguments, f"file reader {n}"), name="file reader", daemon=True)
            for n in range(0 if streams.device.type == "meta" else THREADS)
        ]
        for thread in self._threads:
            thread.start()
        self._end_threads = weakref.finalize(self, _end, self._tasks, self._threads)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def read_bytes(self) -> int:
        return self._reader.read_bytes

    def expect(self, plans: Iterable[ReadPlan]) -> None:
        """Reads ahead: `plans` are what will be taken next, in this order. Blocks nobody."""
        plans = list(dict.fromkeys(plans))[: len(self._blocks)]
        self._order = {plan: place for place, plan in enumerate(plans)}
        for plan in plans:
            if plan in self._fills:
                continue
            block = self._free_block()
            if block is None:
                # One that is being read now does not make way: the host would wait.
                idle = [fill for other, fill in self._fills.items() if other not in plans and fill.is_idle]
                if not idle:
                    return
                block = self._drop(idle[0])
            self._start(plan, block)

    def is_ready(self, plan: ReadPlan) -> bool:
        """Tells whether `take` would not wait."""
        return plan in self._fills and self._fills[plan].is_read

    def take(self, plan: ReadPlan) -> Fill:
        """Returns the block with the bytes of `plan`; blocks the host until they are there. `give_back` follows.

        Raises OSError where a file cannot be read, and ChangedFileError where one has changed.
        """
        start = perf_counter()
        fill = self._fills.get(plan)
        if fill is None:
            last = max(
                self._fills.values(), key=lambda fill: self._order.get(fill.plan, len(self._order)), default=None
            )
            fill = self._start(plan, self._free_block() or self._drop(last))
        self._wait_for(fill)
        self.wait_ms += (perf_counter() - start) * 1e3
        if fill.error is not None:
            self.give_back(fill)
            raise fill.error
        return fill

    def declare_reads(self, fill: Fill, what: str) -> None:
        """Declares that the h2d stream reads the block in the work that it is given next."""
        for part, _ in zip(fill.block.parts, fill.done, strict=False):
            self._streams.reads(self._streams.h2d, part, what)

    def give_back(self, fill: Fill) -> _Block:
        """Frees the block of a fill, which is returned, as soon as the copies queued on the h2d stream are done."""
        fill.block.copied = self._streams.event()
        # The event follows the host too, which has waited for the reads.
        fill.block.copied.record(self._streams.h2d)
        fill.block.fill = None
        del self._fills[fill.plan]
        return fill.block

    def close(self) -> None:
        """Ends the threads. No copy may use a block any more."""
        self._end_threads()
        self._fills.clear()

    def _free_block(self) -> _Block | None:
        return next((block for block in self._blocks if block.fill is None), None)

    def _start(self, plan: ReadPlan, block: _Block) -> Fill:
        fill = Fill(plan, block, [self._streams.signal() for _ in plan.parts])
        self._fills[plan] = block.fill = fill
        for index, signal in enumerate(fill.done):
            if self._threads:
                self._tasks.put((fill, index))
            else:
                signal.set()
        return fill

    def _drop(self, fill: Fill) -> _Block:
        """Ends a fill that nobody has taken; blocks the host until the parts that were begun are read."""
        for index, signal in enumerate(fill.done):
            if fill.takes(index):
                signal.set()
        self._wait_for(fill)
        return self.give_back(fill)

    def _wait_for(self, fill: Fill) -> None:
        for signal in fill.done:
            signal.wait()


class _PartReader:
    """Reads one part of a block; runs on the threads."""

    def __init__(self, files: Mapping[Path, MappedFile], streams: Streams, direct: bool):
        self.read_bytes = 0
        self._files = files
        self._streams = streams
        self._direct = direct

    def __call__(self, fill: Fill, index: int) -> None:
        if fill.block.copied is not None:
            fill.block.copied.synchronize()
        self._streams.writes(None, fill.block.parts[index], f"read of {fill.plan}")
        memory = memoryview(fill.memory.view)
        for read in fill.plan.parts[index]:
            self._read(read, memory)
        for path in {read.path for read in fill.plan.parts[index]}:
            # Before and after the reads: what was read is of the file that was opened.
            self._files[path].check()

    def _read(self, read: _Read, memory: memoryview) -> None:
        file, got = self._files[read.path], 0
        while got < read.needed:
            target = memory[read.position + got : read.position + read.nbytes]
            count = file.read(target, read.offset + got, self._direct)
            if not count:
                file.check()
                raise OSError(errno.EIO, f"ends at byte {read.offset + got}, before its weights do", str(read.path))
            got += count
        self.read_bytes += got


def _work(tasks: Tasks, reader: _PartReader, streams: Streams, name: str) -> None:
    """Reads parts until None comes; each thread has a clock of its own in the stream checker."""
    with streams.beside(name):
        while (task := tasks.get()) is not None:
            fill, index = task
            if fill.takes(index):
                try:
                    reader(fill, index)
                except BaseException as error:
                    fill.error = error
                fill.done[index].set()
            del fill, task


def _end(tasks: Tasks, threads: Sequence[threading.Thread]) -> None:
    """Ends threads, which read nothing more than they have begun."""
    with suppress(Empty):
        while True:
            tasks.get_nowait()
    for _ in threads:
        tasks.put(None)
    # The garbage collector may call this on one of them.
    for thread in threads if threading.current_thread() not in threads else ():
        thread.join()
