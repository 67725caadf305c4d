"""Runs several forwards of a mode on tensors of the meta device, and tells the bytes that they copy and their time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from offload.modes.mode import Mode
from offload.planning.dry_run import left_as_found
from offload.planning.memory_tracker import MemoryTracker
from offload.planning.meta_kernels import fused_kernels
from offload.planning.simulated_streams import SimulatedStreams


@dataclass(frozen=True)
class ForwardRun:
    """Forwards in a row: their FLOPs, the bytes copied in and out, and the ms from their start to the last result.

    `peak_bytes` are on the device at most, besides the slots and what stays there: activations, and what outlives a
    forward, such as a key/value cache.
    """

    flops: float
    h2d_bytes: int
    d2h_bytes: int
    ms: float
    peak_bytes: int


def dry_run_forwards(
    mode: Mode,
    model: nn.Module,
    forwards: Sequence[Callable[[], object]],
    *,
    timed: SimulatedStreams,
    around: Callable[[], AbstractContextManager] | None = None,
    on_gpu: bool = True,
) -> ForwardRun:
    """Attaches `mode` to `model` and calls `forwards` without gradients.

    The model is on the meta device, and left as it was found. The host waits for each result before the next call, as a
    sampler does that looks at it. `around` makes the context around all of them: None is `mode.inference`. Copies of
    units that are fetched for a forward that never comes count in the bytes and not in the time. `on_gpu`: the kernels
    are those of a GPU. Raises the model's error where it needs values.
    """
    tracker = MemoryTracker(timed.spend)
    kernels = fused_kernels(tracker.add_flops, on_gpu)
    with left_as_found(model), torch.random.fork_rng(devices=[]), kernels, tracker.recording(), torch.no_grad():
        mode.attach(model, timed)
        slot_bytes = tracker.live_bytes
        try:
            timed.start_step()
            tracker.start_step()
            before, flops = mode.counters(), tracker.flops
            with (around or mode.inference)():
                for forward in forwards:
                    forward()
                    result = timed.event()
                    result.record(timed.compute)
                    result.synchronize()
                ms = timed.host_ms
            moved = mode.counters() - before
        finally:
            mode.detach()
    peak_bytes = tracker.peak_bytes - slot_bytes
    return ForwardRun(tracker.flops - flops, moved.h2d_bytes, moved.d2h_bytes, ms, peak_bytes)
