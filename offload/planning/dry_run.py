"""Runs a step of a mode, or forwards in a row, on tensors of the meta device, and counts bytes, FLOPs and time.

A formula for the bytes of a mode would repeat the mode. So its own code runs here, with slots, copies and hooks, on a
model without memory: copies are counted where they are made, and device memory by the tracker. It takes seconds for a
model of any size, and no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from inspect import isroutine
from itertools import pairwise

import torch
from torch import Tensor, nn

from offload.activations.checkpointing import recompute
from offload.modes.mode import NO_OPTIONS, Attached, AttachOptions, Mode
from offload.planning.memory_tracker import EVEN, MemoryTracker
from offload.planning.meta_kernels import fused_kernels
from offload.planning.simulated_streams import Bandwidth, PlannedSharers, SimulatedStreams
from offload.sharing.sharers import NO_SHARERS
from offload.streams.stream_checker import CheckedStreams
from offload.torch_private.recomputed_blocks import restore
from offload.torch_private.torch_internals import gradient_accumulator, without_compiler
from offload.weights.gradients.seams import ImmediateUpdates
from offload.weights.units.partition import cut

# The first step records the order of use; the second knows it, as all later ones do.
STEPS = 2
# The attributes that torch keeps in a module: its parameters, buffers, hooks.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))

MOVED = ("h2d_bytes", "d2h_bytes", "activation_h2d_bytes", "activation_d2h_bytes", "waited_for_bytes")
COUNTED = ("flops", "grouped_flops", "attention_flops", "memory_bytes", "exchanged_bytes", *MOVED)


@dataclass(frozen=True)
class Phase:
    """Operations and copies from the beginning of a forward to its end, or from there to the next forward.

    `flops` are those of products, of which `grouped_flops` are products of experts and `attention_flops` those of
    attention; other operations read and write `memory_bytes` in the device's memory.
    `waited_for_bytes` of the bytes are copied while compute stands still. `exchanged_bytes` come from other devices
    that share the homes.
    """

    flops: float
    h2d_bytes: float
    d2h_bytes: float
    activation_h2d_bytes: float
    activation_d2h_bytes: float
    waited_for_bytes: float = 0.0
    memory_bytes: float = 0.0
    exchanged_bytes: float = 0.0
    grouped_flops: float = 0.0
    attention_flops: float = 0.0

    def compute_ms(self, flops_per_s: float, memory_gb_s: float, costs: Mapping[str, float] = EVEN) -> float:
        """Returns the time of products, and of other operations at `memory_gb_s` GB a second.

        A FLOP of a kind in `costs` (grouped, attention) takes as long as that many others.
        """
        flops = self.flops + sum((cost - 1) * getattr(self, f"{kind}_flops") for kind, cost in costs.items())
        return flops / flops_per_s * 1e3 + self.memory_bytes / memory_gb_s / 1e6


@dataclass(frozen=True)
class DryRun:
    """The phases of a step in their order, and its bytes at their peak.

    Device memory is counted without the parameters and buffers that stay there: `peak_bytes` at most, of which
    `slot_bytes` are slots, and `peak_gradient_bytes` gradients that stay. `turn_bytes` are there when forward turns to
    backward, without slots. `host_bytes` are on the host: weights, gradients, activations. `square_bytes` of the
    activations are masks and scores of all pairs of tokens, at most at once.
    """

    phases: tuple[Phase, ...]
    slot_bytes: int
    peak_bytes: int
    peak_gradient_bytes: int
    turn_bytes: int
    host_bytes: int
    square_bytes: int = 0

    @property
    def activation_bytes(self) -> int:
        """The rest of the peak besides slots and gradients that stay: activations, and copies under way."""
        return self.peak_bytes - self.slot_bytes - self.peak_gradient_bytes

    def total(self, key: str) -> float:
        """Sums the attribute `key` over the phases."""
        return sum(getattr(phase, key) for phase in self.phases)

    def swapping(self, share: float) -> DryRun:
        """Returns the dry run of a step that swaps only `share` of the activations that this one swaps."""

        def less(phase: Phase) -> Phase:
            stay = {way: (1 - share) * getattr(phase, f"activation_{way}") for way in ("h2d_bytes", "d2h_bytes")}
            stay |= {f"activation_{way}": nbytes for way, nbytes in stay.items()}
            return replace(phase, **{key: getattr(phase, key) - nbytes for key, nbytes in stay.items()})

        stay_bytes = int((1 - share) * self.total("activation_d2h_bytes"))
        return replace(
            self,
            phases=tuple(less(phase) for phase in self.phases),
            # Most activations are there at the turn, when no gradient is there yet.
            peak_bytes=max(self.peak_bytes, self.slot_bytes + self.turn_bytes + stay_bytes),
            host_bytes=self.host_bytes - stay_bytes,
        )

    def repeated(self, times: Sequence[int]) -> DryRun:
        """Returns the dry run of a step in which each microbatch of this one comes as often as `times` says."""
        pairs = zip(self.phases[::2], self.phases[1::2], strict=True)
        return replace(
            self, phases=tuple(phase for pair, count in zip(pairs, times, strict=True) for phase in pair * count)
        )

    def continued(self, after: DryRun, more: float) -> DryRun:
        """Returns the dry run of a step with `more` microbatches side by side than `after`.

        `after` has one microbatch more than this dry run. The others are as large as that one; a smaller one counts by
        its share. Gradients are those of `after`: they are as large for any number of microbatches. The peak grows by
        what a microbatch more has at the turn, about the most that it has while others compute: the peak of few is
        where one computes, and that of many near the turn, so that peaks of few tell nothing of many.
        """

        def line(first: float, second: float) -> float:
            return second + more * (second - first)

        phases = tuple(
            Phase(**{key: line(getattr(one, key), getattr(two, key)) for key in COUNTED})
            for one, two in zip(self.phases, after.phases, strict=True)
        )
        numbers = {
            field.name: round(line(getattr(self, field.name), getattr(after, field.name))) for field in fields(self)[1:]
        }
        peak = after.peak_bytes + round(more * (after.turn_bytes - self.turn_bytes))
        return DryRun(phases, **numbers | {"peak_bytes": peak, "peak_gradient_bytes": after.peak_gradient_bytes})


@without_compiler
def dry_run(
    mode: Mode,
    model: nn.Module,
    losses: Sequence[Callable[[], Tensor]],
    *,
    recomputed: Iterable[nn.Module] = (),
    norms: bool = False,
    timed: SimulatedStreams | None = None,
    on_gpu: bool = True,
    sharers: PlannedSharers | None = None,
    links: PlannedSharers | None = None,
    options: AttachOptions = NO_OPTIONS,
) -> DryRun:
    """Attaches `mode` to `model` and runs a step. The model is on the meta device, and left as it was found.

    `losses` compute the loss of each microbatch on meta tensors. `recomputed` are the blocks that backward computes
    again, unless the mode does so itself. `norms`: the mode takes the norms of gradients. `timed` are streams that
    record when they do what. `on_gpu`: the kernels are those of a GPU, not of the CPU; they save other tensors for
    backward. `sharers` take the place of those of `options`; None, nobody. `links` count what comes from
    other devices, where these are not the sharers. Raises the model's error where the model
    needs values, and NotFinalError where gradients are released and one is not final when it lands.
    """
    streams = timed or CheckedStreams(torch.device("meta"))
    tracker = MemoryTracker(timed.spend) if timed else MemoryTracker()
    options = replace(options, sharers=sharers or NO_SHARERS)
    resident = [tensor for tensor in mode.footprint(model, options=options).resident if tensor.requires_grad]
    with _on_meta(model, tracker, on_gpu), ExitStack() as stack:
        attached = mode.attach(model, streams, options)
        stack.callback(attached.detach)
        if options.release_gradients:
            attached.use_updates(ImmediateUpdates(streams))
        stack.callback(recompute(recomputed))
        slot_bytes = tracker.live_bytes
        stack.enter_context(_gradients_noted(resident, tracker))
        for _ in range(STEPS):
            model.zero_grad(set_to_none=True)
            tracker.start_step()
            if timed:
                timed.start_step()
            log = _Log(tracker, attached, links or sharers)
            with attached.step(norms):
                attached.accumulate([log.around(loss) for loss in losses])
            log.mark()
        host_bytes = attached.counters().host_pageable_bytes
    return DryRun(
        phases=log.phases(),
        slot_bytes=slot_bytes,
        peak_bytes=tracker.peak_bytes,
        peak_gradient_bytes=tracker.peak_gradient_bytes,
        turn_bytes=log.turn_bytes - slot_bytes,
        host_bytes=host_bytes,
        square_bytes=tracker.square_bytes,
    )


@dataclass(frozen=True)
class ForwardRun:
    """Forwards in a row: the bytes copied in and out, and the ms from their start to the last result.

    `peak_bytes` are on the device at most, besides the slots and what stays there: activations, and what outlives a
    forward, such as a key/value cache.
    """

    h2d_bytes: int
    d2h_bytes: int
    ms: float
    peak_bytes: int


@without_compiler
def dry_run_forwards(
    mode: Mode,
    model: nn.Module,
    forwards: Sequence[Callable[[], object]],
    *,
    timed: SimulatedStreams | None = None,
    on_gpu: bool = True,
    options: AttachOptions = NO_OPTIONS,
) -> ForwardRun:
    """Attaches `mode` to `model`, without the sharers of `options`, and calls `forwards` inside `inference()`.

    The model is on the meta device, and left as it was found. The host waits for each result before the next call, as a
    sampler does that looks at it. Copies of units that are fetched for a forward that never comes count in the bytes
    and not in the time, which without `timed` means nothing. `on_gpu`: the kernels are those of a GPU. Raises the
    model's error where it needs values.
    """
    timed = timed or SimulatedStreams(torch.device("meta"), Bandwidth(1, 1, 1), 1.0)
    tracker = MemoryTracker(timed.spend)
    with _on_meta(model, tracker, on_gpu), torch.no_grad():
        attached = mode.attach(model, timed, replace(options, sharers=NO_SHARERS))
        slot_bytes = tracker.live_bytes
        try:
            timed.start_step()
            tracker.start_step()
            before = attached.counters()
            with attached.inference():
                for forward in forwards:
                    forward()
                    result = timed.event()
                    result.record(timed.compute)
                    result.synchronize()
                ms = timed.host_ms
            moved = attached.counters() - before
        finally:
            attached.detach()
    return ForwardRun(moved.h2d_bytes, moved.d2h_bytes, ms, tracker.peak_bytes - slot_bytes)


@contextmanager
def _on_meta(model: nn.Module, tracker: MemoryTracker, on_gpu: bool) -> Iterator[None]:
    """Counts what runs inside, and leaves the model and torch's random numbers as they were."""
    kernels = fused_kernels(tracker.add_flops, on_gpu)
    with left_as_found(model), torch.random.fork_rng(devices=[]), kernels, tracker.recording():
        yield


@contextmanager
def _gradients_noted(parameters: Iterable[Tensor], tracker: MemoryTracker) -> Iterator[None]:
    """Tells `tracker` when a gradient of these parameters lands."""
    # Hooks on the parameters themselves would change the order of microbatches that a mode chooses. A parameter does
    # not keep its node alive: `nodes` does, with the hooks.
    nodes = [(tensor, gradient_accumulator(tensor)) for tensor in parameters]
    handles = [node.register_hook(lambda *_, tensor=tensor: tracker.gradient_landed(tensor)) for tensor, node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def left_as_found(model: nn.Module) -> Iterator[None]:
    """Puts the parameters and buffers of `model` back afterwards, the same objects, without gradients.

    Attaching a mode to a meta model replaces them, and detaching does not bring the old ones back. Tied weights stay
    tied. Modules have their other attributes again too, and so have plain objects in these: a forward may have kept a
    tensor without values in one, for later forwards.
    """
    before = cut(model, []).resident
    attributes = [(vars(holder), _own_attributes(holder)) for holder in _holders(model)]
    try:
        yield
    finally:
        for now, found in attributes:
            restore(now, found | {name: value for name, value in now.items() if name in OF_EVERY_MODULE})
        for tensor, places in before:
            tensor.grad = None
            for place in places:
                place.assign(tensor)


def _holders(model: nn.Module) -> Iterator[object]:
    """Yields the modules, and the objects in their attributes that a forward may change: no functions, no classes."""
    for module in model.modules():
        yield module
        for value in _own_attributes(module).values():
            if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, type)) and not isroutine(value):
                yield value


def _own_attributes(holder: object) -> dict[str, object]:
    return {name: value for name, value in vars(holder).items() if name not in OF_EVERY_MODULE}


class _Log:
    """Reads the counters where forward begins and ends: when the first microbatch enters it, and the last leaves it."""

    def __init__(self, tracker: MemoryTracker, attached: Attached, links: PlannedSharers | None):
        self.turn_bytes = 0
        self._tracker = tracker
        self._attached = attached
        self._links = links
        self._inside = 0
        self._readings: list[dict[str, float]] = []
        self.mark()

    def mark(self) -> None:
        counters = self._attached.counters()
        self._readings.append(
            {
                "flops": self._tracker.flops,
                **{f"{kind}_flops": count for kind, count in self._tracker.flops_of.items()},
                "memory_bytes": self._tracker.memory_bytes,
                "exchanged_bytes": self._links.exchanged_bytes if self._links else 0.0,
                **{key: getattr(counters, key) for key in MOVED},
            }
        )

    def around(self, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def logged() -> Tensor:
            # Units fetched before the first forward belong to it.
            if not self._inside and len(self._readings) > 1:
                self.mark()
            self._inside += 1
            with self._tracker.recording():
                value = loss()
            self._inside -= 1
            if not self._inside:
                self.mark()
                self.turn_bytes = max(self.turn_bytes, self._tracker.live_bytes)
            return value

        return logged

    def phases(self) -> tuple[Phase, ...]:
        return tuple(
            Phase(**{key: after[key] - before[key] for key in COUNTED}) for before, after in pairwise(self._readings)
        )
