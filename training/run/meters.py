"""Measures the steps between two records: their speed, what the mode moved, and the memory of all ranks."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from offload import Counters
from offload.knobs import GIB, parse_bytes
from training.metrics.run_names import run_name
from training.metrics.step_timer import StepTimer
from training.profiling.hardware import known_peak_flops, reset_peaks, rss_gib, vram_peak_gib, vram_reserved_gib
from training.profiling.timeline import Tracer
from training.run.build import Job
from training.runs import starting

# The counters of updates that may be under way when a step has ended.
UPDATE_COUNTERS = ("update_ms", "updated_parameters", "speculated_parameters", "undone_parameters", "undo_ms")

logger = logging.getLogger(__name__)


class StepMeter:
    """Measures speed and traffic of steps. A traced step is slow, so it counts in neither."""

    def __init__(self, job: Job):
        components = job.components
        self._job = job
        self._timer = StepTimer(job.streams)
        title = run_name(components.config, components.invocation)
        self._tracer = Tracer(components.config, components.invocation.run_dir, job.streams, title, job.start.step)
        self._peak_flops = known_peak_flops(components.device, components.dtype)
        self.units = job.start.units
        """tokens, say, that the run has trained on"""
        self._warm_from = job.start.step + components.config.warmup_steps + 1
        # In the steps that are timed, since the last record.
        self._timed_units = 0
        # The mode's counters at the last record, and those before a step that is traced.
        self._counters = job.attached.counters()
        self._before_trace: Counters | None = None

    def start(self, step: int) -> None:
        """Starts `step`, and the profiler if it is to be traced."""
        if step == self._warm_from:
            # A record has none of the warm-up, if other steps follow in it.
            self._timer.discard()
            self._counters, self._timed_units = self._job.attached.counters(), 0
        self._before_trace = self._job.attached.counters() if self._tracer.start(step) else None
        self._timer.start()

    def stop(self, units: int) -> None:
        """Ends the step, which trained on `units`, and whose last work is queued."""
        self.units += units
        if self._before_trace is None:
            self._timer.stop()
            self._timed_units += units
            return
        trace = self._tracer.stop()
        self._counters += self._job.attached.counters() - self._before_trace
        if trace is not None:
            pictures = {"trace/timeline": trace.picture} if trace.picture else {}
            self._job.tracker.log_files(pictures, [trace.trace], trace.step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves what the mode counts inside the block out of the metrics of steps, but for updates of the last one."""
        before = self._job.attached.counters()
        try:
            yield
        finally:
            moved = self._job.attached.counters() - before
            self._counters += replace(moved, **dict.fromkeys(UPDATE_COUNTERS, 0))

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the steps since the last call. Waits for the device."""
        times_ms = self._timer.collect()
        counters = self._job.attached.counters()
        moved, units = counters - self._counters, self._timed_units
        self._counters, self._timed_units = counters, 0
        if not times_ms:
            return {}
        steps = len(times_ms)
        speed = self._speed(sum(times_ms) / steps / 1e3, units / steps)
        return speed if self._job.components.mode.foreign else speed | traffic(moved, steps) | updates(moved, steps)

    def close(self) -> None:
        """Discards the trace of a step that failed."""
        self._tracer.close()

    def _speed(self, step_s: float, units: float) -> dict[str, float]:
        """Returns the speed of steps of `step_s` seconds that train on `units`, both means."""
        components = self._job.components
        speed = {"perf/step_ms": step_s * 1e3, f"perf/{components.task.unit}_per_s": units / step_s}
        # Those of a plan are a full step's, without padding.
        flops = None if "training" in components.mode.lacks else self._job.plan.model_flops
        if not flops or self._peak_flops is None:
            return speed
        flops *= units / components.task.units(components.config)
        return speed | {"perf/mfu": flops / step_s / self._peak_flops / self._job.ranks.count}


class MemoryMeter:
    """Measures the memory of the GPU that needs most, and of the host that needs most.

    `peaks` has for each rank its largest values in the whole run, by metric.
    """

    def __init__(self, job: Job):
        self._job = job
        self._warned = False
        self.peaks: list[dict[str, float]] = [{} for _ in range(job.ranks.count)]
        reset_peaks(job.components.device)

    def metrics(self) -> dict[str, float]:
        """Returns the peaks on the GPU since the last call, none without a GPU, and the host's memory now."""
        components, ranks = self._job.components, self._job.ranks
        of_ranks = ranks.measured(memory_of_rank(components.device, self._job.attached.counters(), ranks.home_sharers))
        for peaks, values in zip(self.peaks, of_ranks, strict=True):
            peaks.update({name: max(value, peaks.get(name, value)) for name, value in values.items()})
        memory = {
            name: max(values[name] for values in of_ranks)
            if name.startswith("memory/vram")
            else of_largest_host(ranks.hosts, [values[name] for values in of_ranks])
            for name in of_ranks[0]
        }
        if not memory["memory/vram_reserved_gib"] and not memory["memory/vram_peak_gib"]:
            del memory["memory/vram_peak_gib"], memory["memory/vram_reserved_gib"]
        elif not self._warned:
            self._warned = warn_of_held(components.config.vram_budget, memory)
        return memory


def memory_of_rank(device: torch.device, counters: Counters, sharers: int) -> dict[str, float]:
    """Returns the memory of this process in GiB, by metric: its GPU's peaks since the last call, and host memory now.

    Of memory that `sharers` processes share, it counts the part of one.
    """
    memory = {
        "memory/vram_peak_gib": vram_peak_gib(device),
        "memory/vram_reserved_gib": vram_reserved_gib(device),
        "memory/host_pinned_gib": counters.host_pinned_bytes / GIB,
        "memory/rss_gib": rss_gib(sharers),
    }
    # A mode that adapts may need less from here on, which a peak of the whole run would hide.
    reset_peaks(device)
    return memory


def warn_of_held(vram_budget: str | int | None, memory: Mapping[str, float]) -> bool:
    """Warns if torch's allocator holds more of the GPU than `vram_budget`, which limits tensors; returns whether."""
    held, live = memory["memory/vram_reserved_gib"], memory["memory/vram_peak_gib"]
    if vram_budget is None or held * GIB <= parse_bytes("vram_budget", vram_budget):
        return False
    logger.warning(
        "vram_budget=%s: torch's allocator holds %.2f GiB, in which tensors took %.2f GiB: the rest is pieces that no"
        " tensor fitted; a smaller vram_budget leaves room for them%s",
        vram_budget,
        held,
        live,
        "" if starting.segments_expand() else f", and {starting.ALLOCATOR_ADVICE}",
    )
    return True


def of_largest_host(hosts: Sequence[int], values: Sequence[float]) -> float:
    """Returns the largest sum of `values`, one of each rank, over the ranks of one host; `hosts` are those of ranks."""
    totals: dict[int, float] = {}
    for host, value in zip(hosts, values, strict=True):
        totals[host] = totals.get(host, 0) + value
    return max(totals.values())


def traffic(moved: Counters, steps: int) -> dict[str, float]:
    """Returns the metrics of the bytes that `steps` steps moved, as means of a step."""
    found = {
        "transfer/h2d_gib": moved.h2d_bytes / steps / GIB,
        "transfer/d2h_gib": moved.d2h_bytes / steps / GIB,
        "transfer/activations_h2d_gib": moved.activation_h2d_bytes / steps / GIB,
        "transfer/activations_d2h_gib": moved.activation_d2h_bytes / steps / GIB,
    }
    if moved.file_bytes:
        found["transfer/files_gib"] = moved.file_bytes / steps / GIB
        found["transfer/files_wait_ms"] = moved.file_wait_ms / steps
    # A mode whose copies are not timed has no stall.
    if moved.stall_ms is not None:
        found["transfer/stall_ms"] = moved.stall_ms / steps
    return found


def updates(moved: Counters, steps: int) -> dict[str, float]:
    """Returns the metrics of the updates that ran beside `steps` steps, as means of a step."""
    found = {
        "optimizer/host_ms": moved.update_ms / steps,
        "optimizer/wait_ms": moved.update_wait_ms / steps,
        "optimizer/gparams_per_s": moved.updated_parameters / 1e6 / moved.update_ms if moved.update_ms else 0.0,
    }
    # Updates that began before the norm was known. They count as updates when they have ended.
    if moved.speculated_parameters and moved.updated_parameters:
        found["optimizer/speculated"] = moved.speculated_parameters / moved.updated_parameters
        found["optimizer/undone"] = moved.undone_parameters / moved.speculated_parameters
        found["optimizer/undo_ms"] = moved.undo_ms / steps
    return found
