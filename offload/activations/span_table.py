"""Tables of the swapper: the record of the current step, the swapped spans that are alive, and their storages.

A storage is known by its address, beside a weak reference to it: while that lives, no other storage can get the
address. A write in place to saved bytes is noticed by the version counter of the tensor, which autograd advances; views
of a tensor share it, as a rule.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from offload.activations.host_pool import PooledBlock
from offload.activations.policy import Outcome, SpanRecord
from offload.activations.swapped_span import ByteRange, ReleasedSpan, SwappedSpan
from offload.torch_private.torch_internals import StorageWeakRef, set_versions, storage_address


class ExcludedStorages:
    """Storages that are not swapped. A storage that was added several times is excluded until the last removal."""

    def __init__(self) -> None:
        self._storages: dict[int, list[StorageWeakRef]] = {}

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage_address(storage) in self._storages

    def add(self, tensor: torch.Tensor) -> int | None:
        """Excludes the storage of `tensor`, and returns its key. A tensor without a storage (a sparse one) has none."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = storage_address(storage)
        self._storages.setdefault(key, []).append(StorageWeakRef(storage))
        return key

    @contextmanager
    def during(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Excludes the storages of `tensors` for the length of the block."""
        keys = [key for tensor in tensors if (key := self.add(tensor)) is not None]
        try:
            yield
        finally:
            for key in keys:
                self._storages[key].pop()
                if not self._storages[key]:
                    del self._storages[key]


class SavedSpan(NamedTuple):
    """A byte range of a living storage, as it was at `version` of the counter that `handle` shares.

    `swapped` refers to the span on the host; None: the bytes stayed on the device.
    """

    byte_range: ByteRange
    handle: torch.Tensor
    version: int
    record: SpanRecord
    swapped: weakref.ref[SwappedSpan] | None


class SavedStorages:
    """The spans that were saved in this step, by storage: bytes that were saved already are not copied again."""

    def __init__(self) -> None:
        self._spans: dict[int, tuple[StorageWeakRef, list[SavedSpan]]] = {}

    def find(
        self, storage: torch.UntypedStorage, byte_range: ByteRange, tensor: torch.Tensor
    ) -> tuple[SpanRecord, SwappedSpan | None] | None:
        """Returns the record and the swapped span that have `byte_range` of `tensor` as its bytes are now.

        The span is None where the bytes stayed on the device, the result where they were not saved yet. Equal versions
        alone prove nothing: tensors of one storage may have different counters (those of `unsafe_chunk`, in recurrent
        cells).
        """
        _, spans = self._spans.get(storage_address(storage), (None, ()))
        for saved in spans:
            swapped = saved.swapped and saved.swapped()
            is_dead = saved.swapped is not None and swapped is None
            if is_dead or saved.version != tensor._version or not saved.byte_range.contains(byte_range):
                continue
            if share_version(saved.handle, tensor):
                return saved.record, swapped
        return None

    def add(self, storage: torch.UntypedStorage, span: SavedSpan) -> None:
        """Notes that `span` of `storage` was saved."""
        address = storage_address(storage)
        if address not in self._spans:
            self._spans[address] = (StorageWeakRef(storage), [])
        self._spans[address][1].append(span)


def share_version(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors have the same version counter."""
    version, before = one._version, other._version
    set_versions((one,), (version + 1,))
    shared = other._version != before
    set_versions((one,), (version,))
    return shared


def version_handle(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor that shares the version counter of `tensor`, and none of its memory."""
    handle = tensor.detach()
    # Assigning `data` replaces the memory of a tensor, and keeps the counter that it shares with the original.
    handle.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return handle


class StepRecord:
    """The spans of one step, and what is known of the step so far: made when it begins, read when it ends.

    `spans` are the records in the order of saving, `saved` finds the spans by storage, `excluded` are the storages
    that are not swapped in this step. Swapped spans from `first_serial` on are of this step. `budget` bytes may stay on
    the device.
    """

    def __init__(self, first_serial: int = 0, budget: int = 0):
        self.spans: list[SpanRecord] = []
        self.saved = SavedStorages()
        self.excluded = ExcludedStorages()
        self.first_serial = first_serial
        self._budget = budget
        self._kept_bytes = 0
        self._ticks = 0

    def __contains__(self, record: SpanRecord) -> bool:
        return record in self.spans[record.index : record.index + 1]

    @property
    def room(self) -> int:
        """The bytes of the budget that are not taken by spans that stay."""
        return max(self._budget - self._kept_bytes, 0)

    def add(self, nbytes: int) -> SpanRecord:
        """Records that a span of `nbytes` is saved now."""
        record = SpanRecord(len(self.spans), nbytes, saved_at=self._tick())
        self.spans.append(record)
        return record

    def leave(self, record: SpanRecord, within_budget: bool) -> None:
        """Notes that a span stays on the device."""
        record.outcome = Outcome.STAYED
        record.kept = within_budget
        self._kept_bytes += record.nbytes if within_budget else 0

    def use(self, record: SpanRecord) -> bool:
        """Notes that backward asks for a span. Returns True for its first use."""
        if record.used_at is not None:
            return False
        record.used_at = self._tick()
        if record.kept and record in self:
            self._kept_bytes -= record.nbytes
        return True

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks


class SpanTable:
    """Weak references to the swapped spans, numbered in the order of saving, and the order in which they are used.

    Autograd alone keeps spans alive, and may drop them at any time, in any thread. The memory of a dead span waits in
    `released` until the swapper takes it with `pop_released`.
    """

    def __init__(self) -> None:
        self.released: deque[ReleasedSpan] = deque()
        self.next_serial = 0
        self._spans: list[tuple[int, weakref.ref[SwappedSpan]]] = []
        # When the step before used each span, by its index in the order of saving and its size.
        self._used_before: dict[tuple[int, int], int] = {}
        # The spans of this step with these times, soonest first; None where the two steps differ.
        self._expected: list[tuple[int, weakref.ref[SwappedSpan]]] | None = []
        # True: spans were saved since this was made.
        self._has_new_spans = False

    def add(
        self, record: SpanRecord, byte_range: ByteRange, storage: torch.UntypedStorage, block: PooledBlock
    ) -> SwappedSpan:
        """Makes the span of `byte_range` of `storage`, which goes to `block`."""
        serial = self.next_serial
        # An interrupt may come between any two lines: then a span that is not in the table dies.
        self.next_serial += 1
        span = SwappedSpan(serial, record, byte_range, storage, block, self.released)
        self._spans.append((serial, weakref.ref(span)))
        self._has_new_spans = True
        return span

    def pop_released(self) -> ReleasedSpan:
        """Removes a dead span from the table. Returns what it left."""
        released = self.released.popleft()
        index = self._index(released.serial)
        if index < len(self._spans) and self._spans[index][0] == released.serial:
            del self._spans[index]
        return released

    def alive(self) -> list[SwappedSpan]:
        """Returns the spans that are alive, in the order of saving."""
        return [span for _, reference in self._spans if (span := reference()) is not None]

    def used_after(self, record: SpanRecord, step: StepRecord, serial: int) -> Iterator[SwappedSpan | None]:
        """Returns the spans that backward will use after `record`, soonest first; a dead span is None.

        In the order of the step before, if `record` is of `step`, the current one, and all that this has saved was
        saved and used in that one; else in the reverse order of saving, from the span before number `serial` on.
        """
        if self._has_new_spans:
            spans = [span for span in self.alive() if span.serial >= step.first_serial]
            times = [self._used_before.get((span.record.index, span.record.nbytes)) for span in spans]
            pairs = zip(times, map(weakref.ref, spans), strict=True)
            self._expected = None if None in times else sorted(pairs, key=lambda pair: pair[0])
            self._has_new_spans = False
        used_at = self._used_before.get((record.index, record.nbytes)) if record in step else None
        if used_at is None or self._expected is None:
            return (self._spans[index][1]() for index in range(self._index(serial) - 1, -1, -1))
        expected = self._expected
        first = bisect_right(expected, used_at, key=lambda entry: entry[0])
        return (expected[index][1]() for index in range(first, len(expected)))

    def learn(self, step: StepRecord) -> None:
        """Takes the order of use from `step`, which is over."""
        used = [record for record in step.spans if record.used_at is not None]
        self._used_before = {(record.index, record.nbytes): record.used_at for record in used}
        self._expected, self._has_new_spans = [], False

    def _index(self, serial: int) -> int:
        return bisect_left(self._spans, serial, key=lambda entry: entry[0])
