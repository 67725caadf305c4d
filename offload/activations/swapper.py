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
from offload.activations.span_table import SavedSpan, SpanTable, StepRecord, version_handle
from offload.activations.swapped_span import ByteRange, PackedTensor, SpanCopies, SwappedSpan, UnswappedTensor
from offload.memory.host_memory import HostArena
from offload.memory.limits import free_device_bytes
from offload.streams.registry import Event
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

    Those are plain, dense, on the device, of at least `min_bytes`, neither parameters nor views of one, and chosen by
    `policy`. At most `in_flight_bytes` are kept for copies out, and at most `prefetch_bytes` are back ahead of use;
    what the policy's budget leaves free is added to both. Where the host has no room, tensors stay. A write through
    `.data` is not noticed: backward may then find the old values.
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
        self._prefetch_bytes = prefetch_bytes
        self._policy = policy or FixedBudget()
        self._copies = SpanCopies(transfer, in_flight_bytes)
        self._spans = SpanTable()
        self._step = StepRecord(budget=self._policy.budget)

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
        started, stall_ms = telemetry.timestamp() if self._policy.measures else None, telemetry.stall_ms
        self._step = StepRecord(self._spans.next_serial, self._policy.budget)
        for part in (part for tensor in kept for part in parts(tensor)):
            if part.device == self._streams.device:
                self._step.excluded.add(part)
        try:
            yield
        finally:
            self._end_step(started, stall_ms)

    def _end_step(self, started: Event | None, stall_ms: float) -> None:
        """Frees the device memory that is left, and tells the policy how the step went.

        It began at `started`, with `stall_ms` in all. The host waits for its end only for a policy that measures.
        """
        self._reclaim()
        for span in self._spans.alive():
            if span.device_copy is not None:
                self._copies.abandon(span)
        self._copies.stashed.release()
        telemetry, step_ms = self._transfer.telemetry, None
        if self._policy.measures:
            ended = telemetry.timestamp()
            self._settle()
            step_ms = None if started is None or ended is None else started.elapsed_time(ended)
        telemetry.collect()
        self._spans.learn(self._step)
        self._policy.learn(self._step.spans, telemetry.stall_ms - stall_ms, step_ms, self.pool.grew)
        self.pool.end_step()
        self._step = StepRecord(self._spans.next_serial, self._policy.budget)

    def close(self) -> None:
        """Returns the host memory that no saved tensor needs. Tensors that are still saved can be unpacked later."""
        self._reclaim()
        self._copies.stashed.release()
        self._settle()
        self.pool.trim()

    # Pack: autograd saves a tensor.

    def _pack(self, tensor: torch.Tensor) -> object:
        self._reclaim()
        self._copies.unpacked_bytes = 0
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
        choice = self._policy.choose(record.index, record.nbytes, step.room)
        block = self.pool.take(record.nbytes, "activations") if choice is Choice.SWAP else None
        span = None
        if block is not None:
            span = self._spans.add(record, byte_range, storage, block)
            self._copies.send(span, storage)
            self.swapped_bytes += record.nbytes
        else:
            step.leave(record, within_budget=choice is Choice.KEEP)
        self._copies.stashed.fit_into(step.room)
        step.saved.add(storage, SavedSpan(byte_range, handle, handle._version, record, span and weakref.ref(span)))
        return record, span

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
        self._step.use(saved.record)
        # Tensors that stayed are used first. Each use leaves room in the budget, into which swapped ones come back.
        self._prefetch(saved.record, self._spans.next_serial, 0, self._step.room - self._copies.stashed.nbytes)
        return saved.kept.checked()

    def _unpack_swapped(self, packed: PackedTensor) -> torch.Tensor:
        packed.check()
        span, record = packed.span, packed.span.record
        storage, start = span.original(), 0
        if self._step.use(record):
            self._copies.note_use(span)
            self.released_bytes += record.nbytes if record.outcome is Outcome.RELEASED else 0
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
            self._copies.abandon(span)
        if span.device_copy is None:
            if (dropped := span.dropped(self._streams.compute)) is not None:
                return dropped
            self._fetch(span)
        self._copies.mark_ahead(span, False)
        self._prefetch_after(span)
        return self._copies.wait_for(span)

    def _fetch(self, span: SwappedSpan) -> None:
        self._copies.fetch(span)
        self.fetched_bytes += span.byte_range.nbytes

    # Prefetch: copy spans in ahead of use.

    def _prefetch_after(self, current: SwappedSpan) -> None:
        limit = self._prefetch_bytes + max(self._step.room - self._copies.stashed.nbytes, 0)
        self._prefetch(current.record, current.serial, current.pass_number, limit)

    def _prefetch(self, current: SpanRecord, serial: int, pass_number: int, limit: int) -> None:
        """Fetches the spans that are used after `current` while at most `limit` bytes are ahead of use."""
        for span in self._spans.used_after(current, self._step, serial):
            if self._copies.ahead_bytes >= limit:
                return
            # A span of a later pass was used by this backward already; its graph drops it, or keeps it for another.
            is_away = span is not None and span.device_copy is None and span.storage.expired()
            if not is_away or span.pass_number > pass_number:
                continue
            if self._copies.ahead_bytes and self._copies.ahead_bytes + span.byte_range.nbytes > limit:
                return
            self._fetch(span)

    def _reclaim(self) -> None:
        """Takes back the memory of spans that autograd has dropped."""
        while self._spans.released:
            released = self._spans.pop_released()
            self._copies.reclaim(released)
            self.pool.release(released.block)

    def _settle(self) -> None:
        self._streams.synchronize()
        for block in (*self.pool.idle_blocks(), *(span.block for span in self._spans.alive())):
            self._streams.writes(None, block, "the host's next use")
