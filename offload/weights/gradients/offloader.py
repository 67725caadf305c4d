"""Copies gradients from the device to the host, and takes their norms.

Where nobody else reads them, they wait for their updates in a `GradientRing` of page-locked memory: each lands in a
block of it, is read once, by its update, and its memory is then free for another. So host memory for gradients does not
grow with the model.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, nn

from offload.memory.host_memory import HostBlock, aligned
from offload.streams.registry import Signal, Stream, Streams, device_wait_ms
from offload.streams.transfer import DeferredFrees, PendingFree, Transfer
from offload.weights.units.unit import OffloadUnit, UnitTensor

# Numbers in a sum: the norm of so many is right to 1e-5.
PIECE = 1 << 12


def l2_norm(tensor: Tensor) -> Tensor:
    """Returns the L2 norm of a tensor of any shape and floating dtype: a float32 scalar on its device.

    On the CPU it is the norm of the norms of pieces, right to 1e-5. torch's own adds all squares in a few float32 sums
    there: of 131 million numbers it is 1.6% too small, and clipping would differ as much between host and device.
    """
    tensor = tensor.detach()
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    if tensor.device.type != "cpu" or tensor.numel() <= PIECE:
        return torch.linalg.vector_norm(tensor, dtype=dtype).float()
    flat = tensor.contiguous().view(-1)
    whole = flat.numel() // PIECE * PIECE
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, PIECE), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    return torch.linalg.vector_norm(torch.cat([norms, rest.view(1)])).float()


# Gradients that wait to leave together: on the fastest bus of today they take 0.3 ms, and the host saves an event, a
# wait and a stream context for each of them.
BATCH_BYTES = 16 * 2**20


@dataclass(eq=False, slots=True)
class Landing:
    """A gradient on its way home. `leaving` is the device's copy; `is_final`: nothing will be added to it."""

    unit: OffloadUnit
    tensor: UnitTensor
    leaving: PendingFree
    is_final: bool


class GradientOffloader:
    """Copies gradients out on the d2h stream while backward goes on.

    Small ones leave together. At most `limit_bytes` of them wait on the device; beyond that compute waits for the
    oldest to leave. Where `parameter.grad` is set already (accumulation), the earlier gradient is fetched and added on
    the device, and the sum is sent home: the host never adds, and the order of additions is autograd's own.
    """

    def __init__(self, transfer: Transfer, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self._transfer = transfer
        self._streams = transfer.streams
        self._batch_bytes = min(BATCH_BYTES, limit_bytes // 8)
        self._deferred_frees = DeferredFrees(transfer, limit_bytes - self._batch_bytes)
        self._takes_norms = False
        self.waiting: dict[UnitTensor, tuple[OffloadUnit, torch.Tensor, bool]] = {}
        """gradients that have not left: unit, gradient, and whether it is final"""
        self._waiting_bytes = 0
        # The stream on which they were made.
        self._made_on: Stream | None = None

    def begin_step(self, units: Iterable[OffloadUnit], norms: bool) -> None:
        """Forgets the norms of the last step. `norms`: take those of this step, on the device, whose memory is fast."""
        self._takes_norms = norms
        for unit in units:
            for tensor in unit.tensors:
                tensor.gradient.begin_step()

    def land(self, unit: OffloadUnit, tensor: UnitTensor, gradient: torch.Tensor, is_final: bool) -> list[Landing]:
        """Takes a gradient that backward has made on the current stream; its tensor has none that waits.

        Returns the gradients that have left now, as `send` does: none, until there are enough.
        """
        sent, compute = [], self._streams.compute
        if self._made_on is not compute:
            sent = self.send()
            self._made_on = compute
        if self._takes_norms and tensor.host.grad is None:
            self._take_norm(tensor, gradient)
        self.waiting[tensor] = unit, gradient, is_final
        self._waiting_bytes += gradient.nbytes
        return sent + self.send() if self._waiting_bytes > self._batch_bytes else sent

    def send(self) -> list[Landing]:
        """Starts the copies home of the gradients that wait; afterwards `tensor.host.grad` is their host memory.

        The bytes are there once `tensor.gradient.landed` is past. Returns them; the device's copies are for `free`.
        """
        if not self.waiting:
            return []
        streams, d2h, done = self._streams, self._streams.d2h, self._streams.event()
        waiting, self.waiting, self._waiting_bytes = self.waiting, {}, 0
        batch = []
        for tensor, (unit, gradient, is_final) in waiting.items():
            leaving = PendingFree(gradient, done, f"device gradient of {tensor.name}", self._made_on)
            streams.writes(self._made_on, leaving, "backward")
            batch.append(Landing(unit, tensor, leaving, is_final))
        earlier = {landing.tensor: landing.tensor.host.grad for landing in batch}
        added_to = [landing for landing in batch if earlier[landing.tensor] is not None]
        made = streams.event()
        made.record(self._made_on)
        d2h.wait_event(made)
        if added_to:
            self._fetch_and_add(added_to)
        copies = []
        for landing in batch:
            tensor, leaving = landing.tensor, landing.leaving
            streams.reads(d2h, leaving, "copy out")
            streams.writes(d2h, tensor.gradient, "copy out")
            # A gradient that was there is added to in place, as autograd does: its user may have assigned it.
            target = tensor.gradient.memory if earlier[tensor] is None else earlier[tensor]
            copies.append((target, leaving.tensor))
        self._transfer.copies_out(copies, done=done, what=_named(batch))
        for landing, (target, _) in zip(batch, copies, strict=True):
            landing.tensor.gradient.lands(landing.tensor.host, target, done)
        return batch

    def hand_over(self, tensor: UnitTensor, gradient: torch.Tensor) -> PendingFree:
        """Returns a final gradient for work on the d2h stream: its update, or its copy to the memory of the update."""
        streams, compute = self._streams, self._streams.compute
        leaving = PendingFree(gradient, streams.event(), f"device gradient of {tensor.name}", compute)
        streams.writes(compute, leaving, "backward")
        self._take_norm(tensor, gradient)
        self._transfer.after_compute(self._streams.d2h)
        tensor.gradient.is_released, tensor.gradient.landed_in = True, None
        return leaving

    def send_released(self, tensor: UnitTensor, leaving: PendingFree, block: RingBlock) -> None:
        """Starts the copy of a gradient that was handed over to `block`; its bytes are there after `landed`."""
        streams = self._streams
        streams.reads(streams.d2h, leaving, "copy out")
        streams.writes(streams.d2h, block, "copy out")
        self._transfer.copy_out(block.tensor, leaving.tensor, done=leaving.done, what=f"gradient of {tensor.name}")
        tensor.gradient.landed = leaving.done

    def free(self, batch: Sequence[PendingFree]) -> None:
        """Frees the device's copies of gradients that were sent together, behind their copies home."""
        if batch:
            self._deferred_frees.add(*batch)

    def release(self) -> None:
        """Hands the device memory of every gradient back, for use behind its copy."""
        self._deferred_frees.release()

    @staticmethod
    def norms(units: Iterable[OffloadUnit]) -> dict[nn.Parameter, torch.Tensor]:
        """Returns the L2 norms of this step, float32 scalars on the device, of gradients that are as they landed."""
        normed = ((t.host, t.gradient) for unit in units for t in unit.tensors if t.gradient.norm is not None)
        return {host: slot.norm for host, slot in normed if slot.is_released or slot.is_as_landed(host)}

    def _take_norm(self, tensor: UnitTensor, gradient: torch.Tensor) -> None:
        if self._takes_norms:
            # The sum of another order in memory, as convolutions have it, may round otherwise. That of a model that
            # stays on the device has the order of the parameter.
            same = gradient.stride() == tensor.host.stride()
            ordered = gradient if same else torch.empty_like(tensor.host, device=gradient.device).copy_(gradient)
            tensor.gradient.norm = l2_norm(ordered)

    def _fetch_and_add(self, batch: Sequence[Landing]) -> None:
        """Replaces these gradients by their sums with the earlier ones, made on the d2h stream.

        A sum is in the memory of the fetched one: what backward has made may be the gradient of other weights as well.
        """
        streams, h2d, d2h = self._streams, self._streams.h2d, self._streams.d2h
        added, made, copies = streams.event(), [landing.leaving for landing in batch], []
        for landing in batch:
            with streams.on(self._made_on):
                memory = torch.empty_like(landing.leaving.tensor)
            landing.leaving = PendingFree(memory, landing.leaving.done, landing.leaving.name, self._made_on)
            streams.writes(self._made_on, landing.leaving, "what this memory was used for before")
            copies.append((memory, landing.tensor.host.grad))
        # The allocator may hand out memory that kernels already queued still use.
        freed = streams.event()
        freed.record(self._made_on)
        h2d.wait_event(freed)
        landed = [landing.tensor.gradient.landed for landing in batch]
        for event in {id(event): event for event in landed if event}.values():
            h2d.wait_event(event)
        for landing in batch:
            streams.reads(h2d, landing.tensor.gradient, "accumulation")
            streams.writes(h2d, landing.leaving, "copy in")
        arrived = streams.event()
        self._transfer.copies_in(copies, done=arrived, what=f"earlier {_named(batch)}")
        d2h.wait_event(arrived)
        for landing, gradient in zip(batch, made, strict=True):
            streams.reads(d2h, gradient, "accumulation")
            streams.writes(d2h, landing.leaving, "accumulation")
            gradient.done = added
        with streams.on(d2h), torch.no_grad():
            for landing, gradient in zip(batch, made, strict=True):
                landing.leaving.tensor.add_(gradient.tensor)
                self._take_norm(landing.tensor, landing.leaving.tensor)
        added.record(d2h)
        self._deferred_frees.add(*made)


def _named(batch: Sequence[Landing]) -> str:
    others = f" and {len(batch) - 1} more" if len(batch) > 1 else ""
    return f"gradient of {batch[0].tensor.name}{others}"


def is_sparse(gradient: torch.Tensor | None) -> bool:
    """Tells whether a gradient is sparse: how many bytes it has is not known before."""
    return gradient is not None and gradient.layout is not torch.strided


# The ring has room for the gradients of this many of the largest units: one is computed, one lands, one is updated, and
# one is between these.
RING_UNITS = 4
# The least size, for small units: backward is queued no further ahead of the device than the ring has room.
LEAST_RING_BYTES = 256 * 2**20


def gradient_ring_bytes(units: Sequence[OffloadUnit], count: int = 1) -> int:
    """Returns the size of the ring for the gradients of `units`, or for one of `count` equal slices of each.

    It is at most that of all of them.
    """
    sizes = [aligned(-(-unit.gradient_bytes // count), unit.alignment) for unit in units]
    return min(max(RING_UNITS * max(sizes, default=0), LEAST_RING_BYTES), sum(sizes))


@dataclass(eq=False)
class RingBlock:
    """The bytes `start` to `end` of the ring, which hold one gradient. `tensor` has the parameter's shape and dtype.

    Where processes divide the updates, it is 1-D, and has this one's slice. `consumed` is set when the update has read
    it; whoever sets it then sets `ended`, which all blocks have in common.
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

    A block belongs to the caller until it is `lent` to an update. Gradients that land first may be read last, in the
    order of the next forward: were memory taken back in the order of landing, all behind them would wait, and the
    device would run dry. `wait_ms`: how long the host has waited while that had nothing left to compute.
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

    def block(self, tensor: UnitTensor, part: range | None = None) -> RingBlock:
        """Returns memory for the gradient of `tensor`, or for these elements of it, which the d2h stream may write.

        Blocks the host until there is room. That ends: the updates in its way need nothing that is not queued yet.
        """
        size = tensor.nbytes if part is None else len(part) * tensor.dtype.itemsize
        nbytes = aligned(size)
        if self._given is not None:
            # Nobody took it: there was no update, or an exception came before.
            self._reuse(self._given)
        while (start := self._room(nbytes)) is None:
            self._take_back()
        memory = self._memory.piece(start, size)
        gradient = tensor.gradient.over(memory) if part is None else memory.view(tensor.dtype)
        name = f"gradient of {tensor.name} in the ring"
        self._given = RingBlock(gradient, start, start + nbytes, name, self._ended)
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
        self._ended.clear()
        if not self._read:
            self.wait_ms += device_wait_ms(self._streams, self._wait_for_end)
        for block in self._read:
            # Does not block: what follows comes after the update also where threads have clocks.
            block.consumed.wait()
            self._lent.remove(block)
            self._reuse(block)

    @property
    def _read(self) -> list[RingBlock]:
        return [block for block in self._lent if block.consumed.is_set()]

    def _wait_for_end(self) -> None:
        while not self._read:
            self._ended.wait()
            self._ended.clear()

    def _reuse(self, block: RingBlock) -> None:
        self._streams.writes(self._streams.d2h, block, "the next gradient")
