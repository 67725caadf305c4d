"""Activation swapping: what autograd saves for backward waits on the host and is back ahead of use.

The idea of vDNN (Rhu et al. 2016) on the saved-tensor hooks of autograd. A hook lets go of its own reference to the
tensor and of nothing else: memory is free when nobody else holds it, and is only then counted as released.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offload.activations.host_pool import HostPool
from offload.activations.policy import Candidate, Choice, Fate, FixedBudget, SwapPolicy
from offload.activations.storages import (
    Exclusions,
    Origins,
    Packed,
    ReleasedSpan,
    SavedSpan,
    Span,
    Staying,
    SwappedSpan,
    UseOrder,
    VersionHandles,
)
from offload.runtime.deferred_free import DeferredFrees, PendingFree, StashedTensors
from offload.runtime.device_slots import free_device_bytes
from offload.runtime.host_memory import HostArena
from offload.runtime.registry import Event
from offload.runtime.saved_tensor_hooks import Kept, Passed, active_hooks, beneath_claims, claimed
from offload.runtime.transfer import Transfer


class ActivationSwapper:
    """Swaps the tensors that are saved while `hooks` is open.

    Swapped are plain dense tensors on the device of at least `min_bytes` that are neither parameters nor views of
    such, that `predicate` accepts, and that `policy` chooses. `in_flight_bytes` may be kept for copies out that are
    under way, `prefetch_bytes` may be back ahead of use; what the policy's budget leaves free is added to either.
    `host_budget` bounds the host memory (None: what is free); beyond it tensors stay on the device. A write through
    `.data`, of which autograd does not know, is not seen: backward may find what was saved before it.
    """

    def __init__(
        self,
        transfer: Transfer,
        arena: HostArena,
        *,
        min_bytes: int,
        in_flight_bytes: int,
        prefetch_bytes: int,
        host_budget: int | None = None,
        policy: SwapPolicy | None = None,
        predicate: Callable[[torch.Tensor], bool] | None = None,
    ):
        self.swapped_bytes = 0
        self.fetched_bytes = 0
        self.released_bytes = 0
        self.pool = HostPool(arena, transfer.streams, host_budget)
        self._transfer = transfer
        self._streams = transfer.streams
        self._min_bytes = max(min_bytes, 1)
        self._in_flight_bytes = in_flight_bytes
        self._prefetch_bytes = prefetch_bytes
        self._policy = policy or FixedBudget()
        self._predicate = predicate
        self._deferred_frees = DeferredFrees(transfer, in_flight_bytes)
        self._stashed = StashedTensors(self._deferred_frees)
        self._handles = VersionHandles(self._streams.device)
        self._excluded = Exclusions()
        self._origins = Origins()
        self._parcels: list[tuple[int, weakref.ref[SwappedSpan]]] = []
        self._released: deque[ReleasedSpan] = deque()
        self._serial = 0
        self._uses = UseOrder()
        self._ahead_bytes = 0
        self._stall_ms_before = 0.0
        self._began: Event | None = None
        self._forget_step()

    def hooks(self) -> AbstractContextManager:
        """A context in which saved tensors are swapped.

        It does nothing inside itself, inside `keeping`, under hooks that are not of this package, and in a forward
        that backward runs: what is recomputed is used at once.
        """
        return self._open(self._pack)

    def keeping(self) -> AbstractContextManager:
        """A context in which saved tensors stay on the device, though `hooks` be open around it."""
        return self._open(Kept.of, within_own=True)

    def excluding(self, tensors: Iterable[torch.Tensor]) -> AbstractContextManager:
        """A context in which what shares memory with `tensors` is not swapped: the caller keeps it."""
        return self._excluded.during(tensors)

    @contextmanager
    def step(self, kept: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Around forward and backward of one step; what shares memory with `kept` is not swapped in it.

        Afterwards no device memory is held but by copies that whoever computes next is queued behind; after an
        exception too.
        """
        self.begin_step(kept)
        try:
            yield
        finally:
            self.end_step()

    def begin_step(self, kept: Iterable[torch.Tensor] = ()) -> None:
        """A step begins in which what shares memory with `kept` is not swapped: parameters, buffers."""
        self._forget_step()
        for tensor in kept:
            if tensor.device == self._streams.device:
                self._excluded.add(tensor)
        self._policy.begin_step(partial(free_device_bytes, self._streams.device))
        self._stall_ms_before = self._transfer.telemetry.stall_ms
        self._began = self._transfer.telemetry.timestamp() if self._policy.measures else None

    def end_step(self) -> None:
        """Drops what is left on the device and tells the policy how the step went.

        Only for a policy that measures, the host waits for the end of the step: elsewhere it may go on to queue the
        next, so that the device does not stand still meanwhile.
        """
        self._reclaim()
        for parcel in self._alive():
            if parcel.copy is not None:
                self._abandon(parcel)
        self._stashed.release()
        step_ms = self._measured_ms() if self._policy.measures else None
        telemetry = self._transfer.telemetry
        telemetry.collect()
        self._uses.learn(self._record)
        self._policy.learn(self._record, telemetry.stall_ms - self._stall_ms_before, step_ms, self.pool.grew)
        self.pool.end_step()
        self._forget_step()

    def close(self) -> None:
        """Gives the host memory back that no saved tensor needs. What still is saved can be unpacked all the same."""
        self._reclaim()
        self._stashed.release()
        self._settle()
        self.pool.trim()

    def _open(self, pack: Callable[[torch.Tensor], object], within_own: bool = False) -> AbstractContextManager:
        outer = active_hooks()
        around = beneath_claims(outer)
        own = around is not None and getattr(around[0], "owner", None) is self
        recomputing = torch._C._current_graph_task_id() != -1
        if recomputing or (around is not None and not (own and within_own)):
            return nullcontext()

        def marked(tensor: torch.Tensor) -> object:
            return Passed.to(outer, tensor) if claimed(outer, tensor) else pack(tensor)

        marked.owner = self
        return saved_tensors_hooks(marked, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> object:
        self._reclaim()
        self._unpacked_bytes = 0
        if not self._eligible(tensor):
            return Kept.of(tensor)
        storage, span = tensor.untyped_storage(), Span.of(tensor)
        # What is too small to travel would keep all of a storage that does: it goes along.
        found = self._origins.find(storage, span, tensor)
        if found is None and (tensor.nbytes < self._min_bytes or span.nbytes < self._min_bytes):
            return Kept.of(tensor)
        if self._predicate is not None and not self._predicate(tensor):
            return Kept.of(tensor)
        handle = self._handles.of(tensor)
        candidate, parcel = found or self._admit(storage, span, handle)
        if parcel is None:
            return Staying(Kept.of(tensor), candidate)
        shape, strides = tensor.shape, tensor.stride()
        return Packed(parcel, tensor.dtype, tensor.storage_offset(), shape, strides, handle, tensor._version)

    def _eligible(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.device == self._streams.device
            and tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference())
            and not (tensor._is_zerotensor() or isinstance(tensor._base, nn.Parameter))
            and tensor.untyped_storage() not in self._excluded
        )

    def _admit(
        self, storage: torch.UntypedStorage, span: Span, handle: torch.Tensor
    ) -> tuple[Candidate, SwappedSpan | None]:
        candidate = Candidate(len(self._record), span.nbytes, saved_at=self._tick())
        self._record.append(candidate)
        choice = self._policy.choose(candidate.ordinal, span.nbytes, self._room)
        block = self.pool.take(span.nbytes, "activations") if choice is Choice.SWAP else None
        parcel = None
        if block is not None:
            parcel = SwappedSpan(self._serial, candidate, span, storage, block, self._released)
            self._parcels.append((self._serial, weakref.ref(parcel)))
            self._serial += 1
            self._saved_since = True
            self._send(parcel, storage)
        else:
            candidate.fate = Fate.STAYED
            candidate.kept = choice is Choice.KEEP
            self._kept_bytes += span.nbytes if candidate.kept else 0
        self._stashed.fit_into(self._room)
        self._origins.add(storage, SavedSpan(span, handle, handle._version, candidate, parcel and weakref.ref(parcel)))
        return candidate, parcel

    def _send(self, parcel: SwappedSpan, storage: torch.UntypedStorage) -> None:
        streams, block, name = self._streams, parcel.block, f"activation {parcel.candidate.ordinal}"
        flat = torch.empty(0, dtype=torch.uint8, device=streams.device)
        flat.set_(storage, parcel.span.start, (parcel.span.nbytes,), (1,))
        leaving = PendingFree(flat, streams.event(), name, streams.compute)
        streams.writes(streams.compute, leaving, "forward")
        self._transfer.after_compute(streams.d2h)
        if block.used is not None:
            # What was fetched from it may never have been asked for, and then compute did not wait for the copy.
            streams.d2h.wait_event(block.used)
        streams.reads(streams.d2h, leaving, "copy out")
        streams.writes(streams.d2h, block, "copy out")
        self._transfer.copy_out(block.bytes, flat, done=leaving.done, what=name)
        block.used = leaving.done
        parcel.leaving = weakref.ref(leaving)
        self.swapped_bytes += parcel.span.nbytes
        self._stashed.add(leaving)

    def _unpack(self, saved: object) -> torch.Tensor:
        self._reclaim()
        if isinstance(saved, Packed):
            return self._return(saved)
        if isinstance(saved, Passed):
            return saved.unpack(saved.packed)
        if isinstance(saved, Staying):
            self._note_use(saved.candidate)
            # What stayed is used first, and what makes room for the rest: they come back meanwhile.
            coming = self._coming(saved.candidate, len(self._parcels))
            self._prefetch(coming, 0, self._room - self._stashed.nbytes)
            return saved.kept.checked()
        return saved.checked()

    def _return(self, packed: Packed) -> torch.Tensor:
        packed.check()
        parcel = packed.parcel
        original = parcel.original()
        self._note_use(parcel.candidate, parcel)
        if original is not None:
            self._prefetch_behind(parcel)
            packed.round = parcel.unpacked(packed.round)
            return packed.view(original, 0)
        storage = self._copy_of(parcel)
        packed.round = parcel.unpacked(packed.round)
        return packed.view(storage, parcel.span.start)

    def _copy_of(self, parcel: SwappedSpan) -> torch.UntypedStorage:
        if parcel.copy is not None and parcel.copy.owner != self._streams.compute:
            # Memory that another stream was given would be handed out again in that stream's order.
            self._abandon(parcel)
        if parcel.copy is None:
            there = parcel.dropped(self._streams.compute)
            if there is not None:
                return there
            self._fetch(parcel)
        self._expect(parcel, False)
        self._prefetch_behind(parcel)
        self._await(parcel)
        return parcel.copy.tensor.untyped_storage()

    def _note_use(self, candidate: Candidate, parcel: SwappedSpan | None = None) -> None:
        if candidate.used_at is not None:
            return
        candidate.used_at = self._tick()
        if candidate.kept and self._is_of_this_step(candidate):
            self._kept_bytes -= candidate.nbytes
        if parcel is None:
            return
        if parcel.origin.expired():
            candidate.fate = Fate.RELEASED
            self.released_bytes += candidate.nbytes
        else:
            candidate.fate = Fate.STASHED if parcel.is_leaving else Fate.HELD
        self._unpacked_bytes += candidate.nbytes
        if self._unpacked_bytes > 2 * (self._in_flight_bytes + self._stashed.nbytes):
            # Backward is past what was saved last: its copies out are long done, and its memory is wanted.
            self._stashed.release()

    def _fetch(self, parcel: SwappedSpan) -> None:
        streams, name = self._streams, f"activation {parcel.candidate.ordinal}"
        memory = torch.empty(parcel.span.nbytes, dtype=torch.uint8, device=streams.device)
        parcel.copy, parcel.readers = PendingFree(memory, streams.event(), name, streams.compute), []
        streams.writes(streams.compute, parcel.copy, "what this memory was used for before")
        # This also puts it behind the copy out, for which compute had to wait before the memory was let go.
        self._transfer.after_compute(streams.h2d)
        streams.reads(streams.h2d, parcel.block, "copy in")
        streams.writes(streams.h2d, parcel.copy, "copy in")
        self._transfer.copy_in(memory, parcel.block.bytes, done=parcel.copy.done, what=name)
        parcel.block.used = parcel.copy.done
        self.fetched_bytes += parcel.span.nbytes
        self._expect(parcel, True)

    def _prefetch_behind(self, current: SwappedSpan) -> None:
        limit = self._prefetch_bytes + max(self._room - self._stashed.nbytes, 0)
        index = bisect_left(self._parcels, current.serial, key=lambda entry: entry[0])
        self._prefetch(self._coming(current.candidate, index), current.round, limit)

    def _coming(self, candidate: Candidate, before: int) -> Iterator[SwappedSpan | None]:
        """What is used after `candidate`: by the step before, or else the first `before` parcels, the newest first."""
        if self._saved_since:
            self._uses.expect([parcel for parcel in self._alive() if parcel.serial >= self._first_serial])
            self._saved_since = False
        known = self._uses.after(candidate) if self._is_of_this_step(candidate) else None
        return known or (self._parcels[index][1]() for index in range(before - 1, -1, -1))

    def _prefetch(self, coming: Iterator[SwappedSpan | None], round: int, limit: int) -> None:
        """Fetches what is coming as long as at most `limit` bytes are ahead of use."""
        for parcel in coming:
            if self._ahead_bytes >= limit:
                return
            # This backward had those of a later round already; its graph drops them, or keeps them for another.
            if parcel is None or parcel.copy is not None or parcel.round > round or not parcel.origin.expired():
                continue
            if self._ahead_bytes and self._ahead_bytes + parcel.span.nbytes > limit:
                return
            self._fetch(parcel)

    def _await(self, parcel: SwappedSpan) -> None:
        stream = self._streams.compute
        if stream not in parcel.readers:
            self._transfer.await_on(stream, parcel.copy.done)
            parcel.readers.append(stream)
        self._streams.reads(stream, parcel.copy, "backward")

    def _expect(self, parcel: SwappedSpan, ahead: bool) -> None:
        if parcel.ahead != ahead:
            parcel.ahead = ahead
            self._ahead_bytes += parcel.span.nbytes if ahead else -parcel.span.nbytes

    def _abandon(self, parcel: SwappedSpan) -> None:
        """Takes a device copy away that was not used, or not by all that may."""
        if not parcel.readers:
            self._deferred_frees.add(parcel.copy)
        self._expect(parcel, False)
        parcel.drop()

    @property
    def _room(self) -> int:
        """What of the budget is not taken by tensors that stayed."""
        return max(self._policy.budget - self._kept_bytes, 0)

    def _reclaim(self) -> None:
        """Takes back what dead parcels left: autograd may drop them at any time, in any thread."""
        while self._released:
            remains = self._released.popleft()
            index = bisect_left(self._parcels, remains.serial, key=lambda entry: entry[0])
            del self._parcels[index]
            self._ahead_bytes -= remains.ahead_bytes
            if remains.copy is not None:
                self._deferred_frees.add(remains.copy)
            self.pool.give_back(remains.block)

    def _alive(self) -> list[SwappedSpan]:
        return [parcel for _, reference in self._parcels if (parcel := reference()) is not None]

    def _settle(self) -> None:
        self._streams.synchronize()
        for block in (*self.pool.idle_blocks(), *(parcel.block for parcel in self._alive())):
            self._streams.writes(None, block, "whatever the host does next")

    def _forget_step(self) -> None:
        self._first_serial = self._serial
        self._saved_since = False
        self._origins.clear()
        self._excluded.forget()
        self._record = []
        self._ticks = 0
        self._kept_bytes = 0
        self._unpacked_bytes = 0

    def _is_of_this_step(self, candidate: Candidate) -> bool:
        return candidate in self._record[candidate.ordinal : candidate.ordinal + 1]

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks

    def _measured_ms(self) -> float | None:
        """The length of the step, which is over then; None without a clock."""
        ended = self._transfer.telemetry.timestamp()
        self._settle()
        return None if ended is None or self._began is None else self._began.elapsed_time(ended)
