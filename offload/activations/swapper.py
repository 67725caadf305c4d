"""Activation swapping: the tensors that autograd saves for backward wait on the host, and are back ahead of use.

The idea of vDNN (Rhu et al. 2016) on the saved-tensor hooks of autograd. The pack hook drops its own reference to the
tensor and nothing else: device memory is free when nobody else references it, and only then counted as released.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offload.activations.host_pool import HostPool
from offload.activations.policy import Choice, FixedBudget, Outcome, SpanRecord
from offload.activations.span_table import SpanTable, StepRecord
from offload.activations.storages import SavedSpan, version_handle
from offload.activations.swapped_span import ByteRange, PackedTensor, SwappedSpan, UnswappedTensor
from offload.memory.host_memory import HostArena
from offload.memory.limits import free_device_bytes
from offload.streams.deferred_free import DeferredFrees, PendingFree, StashedTensors
from offload.streams.transfer import Transfer
from offload.torch_private.saved_tensor_hooks import Kept, PackHook, Passed, active_hooks, beneath_claims, claimed
from offload.torch_private.tensor_parts import parts
from offload.torch_private.torch_internals import (
    is_function_transform_tensor,
    is_in_backward,
    is_zero_tensor,
    left_out_of_graphs,
    view_base,
)


class ActivationSwapper:
    """Swaps the tensors that are saved while `hooks` is open.

    A tensor is swapped if it is plain, dense, on the device, of at least `min_bytes`, neither a parameter nor a view of
    one, and if `policy` chooses it. At most `in_flight_bytes` are kept for copies out that
    are under way, and at most `prefetch_bytes` are back ahead of use; what the policy's budget leaves free is added to
    both. Where the host has no room, tensors stay on the device.
    A write through `.data` is not noticed, because autograd does not count it: backward may then find the old values.
    """

    def __init__(
        self,
        transfer: Transfer,
        arena: HostArena,
        *,
        min_bytes: int,
        in_flight_bytes: int,
        prefetch_bytes: int,
        policy: FixedBudget | None = None,
    ):
        self.swapped_bytes = 0
        self.fetched_bytes = 0
        self.released_bytes = 0
        self.pool = HostPool(arena, transfer.streams)
        self._transfer = transfer
        self._streams = transfer.streams
        self._min_bytes = max(min_bytes, 1)
        self._in_flight_bytes = in_flight_bytes
        self._prefetch_bytes = prefetch_bytes
        self._policy = policy or FixedBudget()
        self._deferred_frees = DeferredFrees(transfer, in_flight_bytes)
        self._stashed = StashedTensors(self._deferred_frees)
        self._spans = SpanTable()
        self._step = StepRecord()

    def hooks(self) -> AbstractContextManager:
        """Returns a context in which saved tensors are swapped.

        It does nothing inside itself, under hooks that are not of this package, and in a forward that backward runs:
        what a recompute saves is used at once.
        """
        outer = active_hooks()
        if is_in_backward() or beneath_claims(outer) is not None:
            return nullcontext()

        def pack(tensor: torch.Tensor) -> object:
            return Passed.to(outer, tensor) if claimed(outer, tensor) else self._pack(tensor)

        return saved_tensors_hooks(PackHook(pack, self), self._unpack)

    def excluding(self, tensors: Iterable[torch.Tensor]) -> AbstractContextManager:
        """Returns a context in which tensors that share memory with `tensors` are not swapped: the caller keeps it."""
        return self._step.excluded.during(tensors)

    @contextmanager
    def step(self, kept: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Surrounds a step, in which tensors that share memory with `kept` (parameters, buffers) are not swapped.

        Afterwards, also after an exception, the only device memory still held is that of copies for which the compute
        stream has been made to wait.
        """
        telemetry = self._transfer.telemetry
        self._policy.begin_step(partial(free_device_bytes, self._streams.device))
        started = telemetry.timestamp() if self._policy.measures else None
        self._step = StepRecord(self._spans.next_serial, telemetry.stall_ms, started)
        for part in (part for tensor in kept for part in parts(tensor)):
            if part.device == self._streams.device:
                self._step.excluded.add(part)
        try:
            yield
        finally:
            self._end_step()

    def _end_step(self) -> None:
        """Frees the device memory that is left, and tells the policy how the step went.

        The host waits for the end of the step only for a policy that measures. Otherwise it can queue the next step
        at once, so that the device does not stand still meanwhile.
        """
        self._reclaim()
        for span in self._spans.alive():
            if span.device_copy is not None:
                self._abandon(span)
        self._stashed.release()
        step_ms = self._measured_ms() if self._policy.measures else None
        telemetry = self._transfer.telemetry
        telemetry.collect()
        self._spans.learn(self._step)
        self._policy.learn(self._step.spans, telemetry.stall_ms - self._step.stall_ms, step_ms, self.pool.grew)
        self.pool.end_step()
        self._step = StepRecord(self._spans.next_serial)

    def close(self) -> None:
        """Returns the host memory that no saved tensor needs. Tensors that are still saved can be unpacked later."""
        self._reclaim()
        self._stashed.release()
        self._settle()
        self.pool.trim()

    # Pack: autograd saves a tensor.

    def _pack(self, tensor: torch.Tensor) -> object:
        self._reclaim()
        self._step.unpacked_bytes = 0
        if not self._is_eligible(tensor):
            return Kept.of(tensor)
        storage, byte_range = tensor.untyped_storage(), ByteRange.of(tensor)
        # A small tensor would keep the whole storage alive: if the storage is swapped, the small tensor is, too.
        found = self._step.saved.find(storage, byte_range, tensor)
        if found is None and min(tensor.nbytes, byte_range.nbytes) < self._min_bytes:
            return Kept.of(tensor)
        handle = version_handle(tensor)
        record, span = found or self._admit(storage, byte_range, handle)
        return UnswappedTensor(Kept.of(tensor), record) if span is None else PackedTensor(span, tensor, handle)

    def _is_eligible(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.device == self._streams.device
            and tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference())
            and not (is_zero_tensor(tensor) or is_function_transform_tensor(tensor))
            and not isinstance(view_base(tensor), nn.Parameter)
            and tensor.untyped_storage() not in self._step.excluded
        )

    def _admit(
        self, storage: torch.UntypedStorage, byte_range: ByteRange, handle: torch.Tensor
    ) -> tuple[SpanRecord, SwappedSpan | None]:
        """Records bytes that were not saved before in this step, and sends them out if the policy chooses so."""
        step = self._step
        record = step.add(byte_range.nbytes)
        choice = self._policy.choose(record.index, record.nbytes, self._room)
        block = self.pool.take(record.nbytes, "activations") if choice is Choice.SWAP else None
        span = None
        if block is not None:
            span = self._spans.add(record, byte_range, storage, block)
            step.has_new_spans = True
            self._send(span, storage)
        else:
            record.outcome = Outcome.STAYED
            record.kept = choice is Choice.KEEP
            step.kept_bytes += record.nbytes if record.kept else 0
        self._stashed.fit_into(self._room)
        step.saved.add(storage, SavedSpan(byte_range, handle, handle._version, record, span and weakref.ref(span)))
        return record, span

    # Send: copy a span out.

    def _send(self, span: SwappedSpan, storage: torch.UntypedStorage) -> None:
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
        self.swapped_bytes += span.byte_range.nbytes
        self._stashed.add(leaving)

    # Unpack: backward asks for a tensor.

    @left_out_of_graphs
    def _unpack(self, saved: object) -> torch.Tensor:
        self._reclaim()
        if isinstance(saved, PackedTensor):
            return self._unpack_swapped(saved)
        if isinstance(saved, Passed):
            return saved.unpack(saved.packed)
        if isinstance(saved, Kept):
            return saved.checked()
        self._note_use(saved.record)
        # Tensors that stayed are used first. Each use leaves room in the budget, into which swapped ones come back.
        coming = self._spans.used_after(saved.record, self._step, self._spans.next_serial)
        self._prefetch(coming, 0, self._room - self._stashed.nbytes)
        return saved.kept.checked()

    def _unpack_swapped(self, packed: PackedTensor) -> torch.Tensor:
        packed.check()
        span = packed.span
        storage, start = span.original(), 0
        self._note_use(span.record, span)
        if storage is None:
            storage, start = self._copy_of(span), span.byte_range.start
        else:
            self._prefetch_after(span)
        packed.pass_number = span.tensor_unpacked(packed.pass_number)
        return packed.view(storage, start)

    def _copy_of(self, span: SwappedSpan) -> torch.UntypedStorage:
        """Returns the device copy of `span`, for which compute waits; makes it where there is none."""
        if span.device_copy is not None and span.device_copy.owner != self._streams.compute:
            # The allocator reuses memory in the order of the stream that it was allocated on: not on this one.
            self._abandon(span)
        if span.device_copy is None:
            dropped = span.dropped(self._streams.compute)
            if dropped is not None:
                return dropped
            self._fetch(span)
        self._spans.mark_ahead(span, False)
        self._prefetch_after(span)
        self._await(span)
        return span.device_copy.tensor.untyped_storage()

    def _note_use(self, record: SpanRecord, span: SwappedSpan | None = None) -> None:
        """Records the first use of a span (None: it stayed on the device), and how its memory fared until then."""
        if record.used_at is not None:
            return
        step = self._step
        record.used_at = step.tick()
        if record.kept and record in step:
            step.kept_bytes -= record.nbytes
        if span is None:
            return
        if span.storage.expired():
            record.outcome = Outcome.RELEASED
            self.released_bytes += record.nbytes
        else:
            record.outcome = Outcome.STASHED if span.is_leaving else Outcome.REFERENCED
        step.unpacked_bytes += record.nbytes
        if step.unpacked_bytes > 2 * (self._in_flight_bytes + self._stashed.nbytes):
            # Backward is past the tensors that were saved last: their copies out are long done, release their memory.
            self._stashed.release()

    # Fetch: copy a span in.

    def _fetch(self, span: SwappedSpan) -> None:
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
        self.fetched_bytes += span.byte_range.nbytes
        self._spans.mark_ahead(span, True)

    def _await(self, span: SwappedSpan) -> None:
        stream = self._streams.compute
        if stream not in span.ready_on:
            self._transfer.await_on(stream, span.device_copy.done)
            span.ready_on.append(stream)
        self._streams.reads(stream, span.device_copy, "backward")

    def _abandon(self, span: SwappedSpan) -> None:
        """Frees a device copy that was not used, or not by all tensors of the span."""
        if not span.ready_on:
            self._deferred_frees.add(span.device_copy)
        self._spans.mark_ahead(span, False)
        span.drop()

    # Prefetch: copy spans in ahead of use.

    def _prefetch_after(self, current: SwappedSpan) -> None:
        limit = self._prefetch_bytes + max(self._room - self._stashed.nbytes, 0)
        coming = self._spans.used_after(current.record, self._step, current.serial)
        self._prefetch(coming, current.pass_number, limit)

    def _prefetch(self, coming: Iterator[SwappedSpan | None], pass_number: int, limit: int) -> None:
        """Fetches the spans that are `coming` while at most `limit` bytes are ahead of use."""
        for span in coming:
            if self._spans.ahead_bytes >= limit:
                return
            # A span of a later pass was used by this backward already; its graph drops it, or keeps it for another.
            if span is None or span.device_copy is not None or span.pass_number > pass_number:
                continue
            if not span.storage.expired():
                continue
            if self._spans.ahead_bytes and self._spans.ahead_bytes + span.byte_range.nbytes > limit:
                return
            self._fetch(span)

    @property
    def _room(self) -> int:
        """The bytes of the budget that are not taken by tensors that stayed."""
        return max(self._policy.budget - self._step.kept_bytes, 0)

    def _reclaim(self) -> None:
        """Takes back the memory of spans that autograd has dropped."""
        while self._spans.released:
            released = self._spans.pop_released()
            if released.device_copy is not None:
                self._deferred_frees.add(released.device_copy)
            self.pool.release(released.block)

    def _settle(self) -> None:
        self._streams.synchronize()
        for block in (*self.pool.idle_blocks(), *(span.block for span in self._spans.alive())):
            self._streams.writes(None, block, "the host's next use")

    def _measured_ms(self) -> float | None:
        """Waits for the end of the step. Returns its length in ms; None on a device without a clock."""
        ended = self._transfer.telemetry.timestamp()
        self._settle()
        started = self._step.started
        return None if ended is None or started is None else started.elapsed_time(ended)
