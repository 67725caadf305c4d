"""A swapped span: bytes of a storage that wait on the host until backward uses them.

Tensors come and go while the storage below them stays, and one storage may be saved as many views. So a swap is of
a byte range of a storage, and every view of it that is saved shares the copy.

Lifecycle of a swapped span
---------------------------
State        Entered by                                 Order on the device
leaving      `SpanCopies.send`, when a tensor           d2h waits for compute, which wrote the bytes, and for
             is saved for the first time                `block.used`, the last copy that used the host block.
                                                        `leaving` refers to the memory until the copy is done.
on the host  `StashedTensors` and `DeferredFrees`, one  compute waits for `leaving.done` before the reference to the
             after the other, when there is no more     memory goes, so that whatever gets the memory next, in the
             room, or at the end of the step            order of compute, cannot overwrite it under the copy.
(in place)   somebody else still references the         none: `original` returns the storage, nothing is copied.
             storage
coming back  `SpanCopies.fetch`, when backward          h2d waits for compute: for what used the new memory before,
             asks for it, or ahead of that              and, since compute waited for it, for the copy out.
             (`is_ahead`)
in use       `SpanCopies.wait_for`, when backward       compute waits for `device_copy.done`, and is then listed in
             asks for it                                `ready_on`. Another compute stream gets a copy of its own.
on the host  `tensor_unpacked`, when every tensor was   none: autograd has the only references to the memory, and
             unpacked in this pass                      compute has waited. A copy that no stream waited for goes
                                                        through `DeferredFrees` (`SpanCopies.abandon`).
released     `__del__`, in any thread, when autograd    none yet: `released` takes the block and the copy. The
             drops the last packed tensor               swapper's next pack or unpack gives the block back to the
                                                        pool, where `block.used` orders its next use.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import NamedTuple

import torch

from offload.activations.host_pool import PooledBlock
from offload.activations.policy import Outcome, SpanRecord
from offload.memory.host_memory import ALIGNMENT_BYTES
from offload.streams.registry import Stream
from offload.streams.transfer import DeferredFrees, PendingFree, StashedTensors, Transfer
from offload.torch_private.saved_tensor_hooks import Kept, check_version
from offload.torch_private.torch_internals import StorageWeakRef, storage_of


class ByteRange(NamedTuple):
    """The bytes `start` to `stop` of a storage."""

    start: int
    stop: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ByteRange:
        """Returns the bytes that are copied for `tensor`.

        They are the tensor's own if it has no holes and less than half of the storage, else the whole storage: the
        rest of it is likely to be saved with the next tensor, which overlaps. The start is rounded down, so that a
        tensor comes back with the alignment that it had: kernels choose by alignment.
        """
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        whole = cls(0, tensor.untyped_storage().nbytes())
        if extent != tensor.numel() or 2 * tensor.nbytes >= whole.nbytes:
            return whole
        start = tensor.storage_offset() * tensor.itemsize
        return cls(start // ALIGNMENT_BYTES * ALIGNMENT_BYTES, start + tensor.nbytes)

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def contains(self, other: ByteRange) -> bool:
        return self.start <= other.start and other.stop <= self.stop


class ReleasedSpan(NamedTuple):
    """The memory of a span of which autograd has dropped the last tensor: the host block, and the device copy."""

    serial: int
    block: PooledBlock
    device_copy: PendingFree | None
    ahead_bytes: int


class SwappedSpan:
    """A byte range of one storage, copied to the host block `block`. The module's docstring has its lifecycle.

    `serial`: its number in the order of saving. `storage` is a weak reference to the storage. `device_copy` is the
    memory that the bytes came back to, `ready_on` lists the streams that wait for that already, `is_ahead`: backward
    has not asked for it yet. `pass_number` counts how often all tensors were unpacked. `leaving` refers to memory that
    is copied out. Only the tensors that were packed keep a span alive.
    """

    def __init__(
        self,
        serial: int,
        record: SpanRecord,
        byte_range: ByteRange,
        storage: torch.UntypedStorage,
        block: PooledBlock,
        released: deque[ReleasedSpan],
    ):
        self.serial = serial
        self.record = record
        self.byte_range = byte_range
        self.storage = StorageWeakRef(storage)
        self.block = block
        self.leaving: weakref.ref[PendingFree] | None = None
        self.device_copy: PendingFree | None = None
        self.ready_on: list[Stream] = []
        self.is_ahead = False
        self.pass_number = 0
        self._released = released
        self._num_tensors = 0
        self._num_packed = 0
        self._dropped: StorageWeakRef | None = None

    def __del__(self) -> None:
        copy = None if self.ready_on else self.device_copy
        ahead_bytes = self.byte_range.nbytes if self.is_ahead else 0
        self._released.append(ReleasedSpan(self.serial, self.block, copy, ahead_bytes))

    @property
    def is_leaving(self) -> bool:
        """True while the memory that is copied out is kept for that copy."""
        return self.leaving is not None and self.leaving() is not None

    def original(self) -> torch.UntypedStorage | None:
        """Returns the storage that was saved, if it is still alive."""
        return storage_of(self.storage.cdata)

    def add_tensor(self) -> int:
        """Notes one more packed tensor. Returns the pass in which it will be unpacked first."""
        self._num_tensors += 1
        self._num_packed += 1
        return self.pass_number

    def tensor_unpacked(self, pass_number: int) -> int:
        """Notes that a tensor was unpacked that waited for `pass_number`. Returns the pass that it waits for next.

        When every tensor was unpacked once, the device copy is dropped and the next pass begins.
        """
        if pass_number == self.pass_number:
            self._num_packed -= 1
        following = self.pass_number + 1
        if not self._num_packed:
            self.drop()
            self.pass_number, self._num_packed = following, self._num_tensors
        return following

    def drop(self) -> None:
        """Drops the device copy. `ready_on` keeps the streams that waited for it until the next copy is made."""
        if self.device_copy is not None:
            self._dropped = StorageWeakRef(self.device_copy.tensor.untyped_storage())
            self.device_copy = None

    def dropped(self, stream: Stream) -> torch.UntypedStorage | None:
        """Returns the copy that was dropped, if somebody still references it and `stream` has waited for it.

        A backward formula may ask several times for the tensors that it saved.
        """
        if self._dropped is None or stream not in self.ready_on:
            return None
        return storage_of(self._dropped.cdata)


class SpanCopies:
    """Copies spans to the host and back: the module's docstring has what each copy waits for.

    Memory that is copied out is in `stashed` until there is no room for it; then at most `in_flight_bytes` of it wait
    for their copies. `ahead_bytes` are back on the device before backward asked for them. `unpacked_bytes` were
    unpacked since autograd saved the last tensor.
    """

    def __init__(self, transfer: Transfer, in_flight_bytes: int):
        self.ahead_bytes = 0
        self.unpacked_bytes = 0
        self._in_flight_bytes = in_flight_bytes
        self._deferred_frees = DeferredFrees(transfer, in_flight_bytes)
        self.stashed = StashedTensors(self._deferred_frees)
        self._transfer = transfer
        self._streams = transfer.streams

    def note_use(self, span: SwappedSpan) -> None:
        """Notes that backward uses a span for the first time, and how its memory has fared until then."""
        record = span.record
        if span.storage.expired():
            record.outcome = Outcome.RELEASED
        else:
            record.outcome = Outcome.STASHED if span.is_leaving else Outcome.REFERENCED
        self.unpacked_bytes += record.nbytes
        if self.unpacked_bytes > 2 * (self._in_flight_bytes + self.stashed.nbytes):
            # Backward is past the tensors that were saved last: their copies out are long done, release their memory.
            self.stashed.release()

    def send(self, span: SwappedSpan, storage: torch.UntypedStorage) -> None:
        streams, block, name = self._streams, span.block, f"activation {span.record.index}"
        flat = torch.empty(0, dtype=torch.uint8, device=streams.device)
        flat.set_(storage, span.byte_range.start, (span.byte_range.nbytes,), (1,))
        leaving = PendingFree(flat, streams.event(), name, streams.compute)
        streams.writes(streams.compute, leaving, "forward")
        self._transfer.after_compute(streams.d2h)
        if block.used is not None:
            # The last copy from the block may be a prefetch that nobody used, for which compute did not wait.
            streams.d2h.wait_event(block.used)
        streams.reads(streams.d2h, leaving, "copy out")
        streams.writes(streams.d2h, block, "copy out")
        self._transfer.copy_out(block.bytes, flat, done=leaving.done, what=name)
        block.used = leaving.done
        span.leaving = weakref.ref(leaving)
        self.stashed.add(leaving)

    def fetch(self, span: SwappedSpan) -> None:
        streams, name = self._streams, f"activation {span.record.index}"
        memory = torch.empty(span.byte_range.nbytes, dtype=torch.uint8, device=streams.device)
        span.device_copy, span.ready_on = PendingFree(memory, streams.event(), name, streams.compute), []
        streams.writes(streams.compute, span.device_copy, "what this memory was used for before")
        # This also orders it after the copy out: compute waited for that before the memory was released.
        self._transfer.after_compute(streams.h2d)
        streams.reads(streams.h2d, span.block, "copy in")
        streams.writes(streams.h2d, span.device_copy, "copy in")
        self._transfer.copy_in(memory, span.block.bytes, done=span.device_copy.done, what=name)
        span.block.used = span.device_copy.done
        self.mark_ahead(span, True)

    def mark_ahead(self, span: SwappedSpan, is_ahead: bool) -> None:
        """Notes whether `span` is on the device before backward asked for it."""
        if span.is_ahead != is_ahead:
            span.is_ahead = is_ahead
            self.ahead_bytes += span.byte_range.nbytes if is_ahead else -span.byte_range.nbytes

    def wait_for(self, span: SwappedSpan) -> torch.UntypedStorage:
        """Makes compute wait for the device copy. Returns its storage."""
        stream = self._streams.compute
        if stream not in span.ready_on:
            self._transfer.await_on(stream, span.device_copy.done)
            span.ready_on.append(stream)
        self._streams.reads(stream, span.device_copy, "backward")
        return span.device_copy.tensor.untyped_storage()

    def abandon(self, span: SwappedSpan) -> None:
        """Frees a device copy that was not used, or not by all tensors of the span."""
        if not span.ready_on:
            self._deferred_frees.add(span.device_copy)
        self.mark_ahead(span, False)
        span.drop()

    def reclaim(self, released: ReleasedSpan) -> None:
        """Frees the device copy of a span that autograd has dropped."""
        self.ahead_bytes -= released.ahead_bytes
        if released.device_copy is not None:
            self._deferred_frees.add(released.device_copy)


class PackedTensor:
    """A saved tensor as a view of a swapped span, with the version that autograd would check.

    `handle` is an empty tensor that shares the version counter, without the memory. `pass_number` is the pass of the
    span in which this tensor is unpacked next.
    """

    def __init__(self, span: SwappedSpan, tensor: torch.Tensor, handle: torch.Tensor):
        self.span = span
        self.pass_number = span.add_tensor()
        self._dtype = tensor.dtype
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._handle = handle
        self._version = tensor._version

    def check(self) -> None:
        """Raises RuntimeError if the tensor was modified since it was saved."""
        check_version(self._handle._version, self._version, self._dtype, self._layout[1])

    def view(self, storage: torch.UntypedStorage, start: int) -> torch.Tensor:
        """Returns the tensor over `storage`, whose first byte is byte `start` of the storage that was saved."""
        offset, shape, strides = self._layout
        flat = torch.empty(0, dtype=self._dtype, device=storage.device)
        return flat.set_(storage, offset - start // self._dtype.itemsize, shape, strides)


class UnswappedTensor(NamedTuple):
    """A saved tensor that could have been swapped and stayed on the device."""

    kept: Kept
    record: SpanRecord
