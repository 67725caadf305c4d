"""Records the metrics of the logged steps: in metrics.jsonl, in wandb and on the terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from offload import GIB, Counters, parse_bytes
from training.batches import Batch, sha256_of
from training.checkpoints.state import RunState, digest_of_all
from training.metrics.progress import Progress
from training.metrics.run_summary import FIRST_LOSS, RunSummary
from training.metrics.step_timer import StepTimer
from training.metrics.wandb_tracker import run_name
from training.profiling.hardware import known_peak_flops, reset_peaks, rss_gib, vram_peak_gib, vram_reserved_gib
from training.profiling.trace import Tracer
from training.run.build import Job
from training.runs import allocator
from training.runs.console import note_failures
from training.runs.files import SAMPLES_FILE
from training.runs.records import MetricsWriter, stream_metrics, write_summary
from training.tasks.sample import Sample

# The counters of updates that may be under way when a step has ended.
UPDATE_COUNTERS = ("update_ms", "updated_parameters", "speculated_parameters", "undone_parameters", "undo_ms")

logger = logging.getLogger(__name__)


class Recorder:
    """Turns the steps since the last logged one into one record, and writes it everywhere."""

    def __init__(self, job: Job):
        components, start = job.components, job.start
        config, run_dir = components.config, components.invocation.run_dir
        self._job = job
        self._device = components.device
        self._mode = components.mode
        self._forward_only = "training" in self._mode.lacks
        self._run_dir = run_dir
        self._timer = StepTimer(job.streams)
        # A run that starts at its first step makes the evaluation before it, too.
        self._writer = MetricsWriter(run_dir, start.step or -1)
        self._progress = Progress(config.steps, initial_step=start.step)
        self._summary = RunSummary(config.warmup_steps, start.step)
        self.evaluated_step: int | None = None
        """The step of the last evaluation that is recorded."""
        for record in stream_metrics(run_dir):
            self._add(record)
        job.checkpoints.best.link()
        self.sampled_step: int | None = None
        """The step of the last sample that is recorded."""
        self._samples: MetricsWriter | None = None
        if config.sample.every is not None or (run_dir / SAMPLES_FILE).exists():
            self._samples = MetricsWriter(run_dir, start.step or -1, SAMPLES_FILE)
            for record in stream_metrics(run_dir, SAMPLES_FILE):
                self.sampled_step = record["train/step"]
        title = run_name(components.invocation.choices, config.seed)
        self._tracer = Tracer(config, run_dir, job.streams, title, start.step)
        self._peak_flops = known_peak_flops(self._device, components.dtype)
        self._unit = components.task.unit
        # Of a full step without padding, as the plan takes it; in the run so far; and in the steps that are timed,
        # since the last record.
        self._planned_units = components.task.units(config)
        self._units, self._timed_units = start.units, 0
        self._units_of_step = 0
        self._step = self._last_step = start.step
        self._skipped_steps = start.skipped_steps
        # The loss of the first step, until it is recorded.
        self._first_step = start.step + 1
        self._first_loss: Tensor | None = None
        # Steps since the last record that were traced, and what the mode had counted before one.
        self._traced_steps = 0
        self._before_trace: Counters | None = None
        # The mode's counters at the last record.
        self._counters = self._job.components.counters()
        self._save_ms: list[float] = []
        self._held_warned = False
        # Peaks of the whole run, on each rank.
        self._rank_peaks: list[dict[str, float]] = [{} for _ in range(job.ranks.count)]
        reset_peaks(self._device)

    def start_step(self, step: int, units: int) -> None:
        """Starts the timer of `step`, which trains on `units` tokens, say, and the profiler if it is to be traced."""
        self._units_of_step = units
        self._before_trace = self._job.components.counters() if self._tracer.start(step) else None
        self._step = step
        self._timer.start()

    def end_step(self, skipped: bool, loss: Tensor) -> None:
        """Ends the step, whose last work is queued. A traced step is slow, so it counts in no speed or traffic."""
        self._skipped_steps += skipped
        self._units += self._units_of_step
        if self._first_loss is None and not self._summary.has_first_loss:
            self._first_loss = loss
        if self._before_trace is None:
            self._timer.stop()
            self._timed_units += self._units_of_step
        else:
            self._end_trace()
        self._progress.update(self._step)

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Leaves what the mode counts inside the block out of the metrics of steps, but for updates of the last one."""
        before = self._job.components.counters()
        try:
            yield
        finally:
            moved = self._job.components.counters() - before
            updates = dict.fromkeys(UPDATE_COUNTERS, 0)
            self._counters += replace(moved, **updates)

    def record(
        self,
        step: int,
        loss: Tensor,
        norm: float | None,
        lr: float,
        evaluation: Mapping[str, float],
        figures: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Waits for the device and writes the metrics of the steps since the last record, and of an evaluation now.

        `figures` are those of the task, of this step, by name.
        """
        times_ms = self._timer.collect()
        counters = self._job.components.counters()
        record = {
            "train/step": step,
            "train/loss": loss.item(),
            **{f"train/{name}": figure.item() for name, figure in (figures or {}).items()},
            **({} if norm is None else {"train/grad_norm": norm}),
            "train/lr": lr,
            **self._seen(step),
            "train/skipped_steps": self._skipped_steps,
            **self._memory(counters),
            **evaluation,
        }
        if times_ms:
            steps = step - self._last_step - self._traced_steps
            moved = counters - self._counters
            record |= self._speed(sum(times_ms) / len(times_ms) / 1e3, self._timed_units / len(times_ms))
            if not self._mode.foreign:
                record |= _traffic(moved, steps) | _updates(moved, steps)
        self._counters, self._last_step, self._traced_steps, self._timed_units = counters, step, 0, 0
        if self._save_ms:
            record["checkpoint/save_ms"] = sum(self._save_ms)
            self._save_ms.clear()
        self._write(step, record)

    def record_evaluation(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Writes the metrics of an evaluation after a step that is not logged; nothing if there are none."""
        if evaluation:
            self._write(step, {"train/step": step, **evaluation})

    def record_sample(self, step: int, sample: Sample) -> None:
        """Writes and shows what the model made after `step` steps. Call it before `record`.

        A picture that cannot be written gives a warning, and no error.
        """
        self.sampled_step = step
        try:
            shown = sample.write(self._run_dir, step)
        except OSError as error:
            logger.warning("the sample after step %d could not be written (%s)", step, error.strerror or error)
            return
        self._job.tracker.log_sample(shown, step)
        texts = {
            name: str(value.relative_to(self._run_dir)) if isinstance(value, Path) else value
            for name, value in shown.items()
        }
        self._samples.write({"train/step": step, **texts})
        self._progress.note(f"sample after step {step}: {' '.join(texts.values())}")

    def save(self, step: int, batch: Batch, required: bool) -> bool:
        """Saves the run after `step`, whose batch was `batch`; returns False if the disk refused it.

        Call it after the step was recorded, so that a run that resumes from there lacks no record.
        """
        if self._first_loss is not None:
            self._write(step, {"train/step": step})
        self._writer.sync()
        if self._samples is not None:
            self._samples.sync()
        digests = sha256_of(batch), digest_of_all(self._job.dataset)
        job = self._job
        ids = job.tracker.id, job.evaluation.sha256, job.source_sha256
        state = RunState(step, self._skipped_steps, *digests, *ids, self._units)
        save_ms = self._job.checkpoints.save(state, required)
        if save_ms is not None:
            self._save_ms.append(save_ms)
        return save_ms is not None

    def finish(self, steps: int, status: str, reason: str | None = None) -> dict:
        """Writes and returns the summary of a run that ends well after `steps` steps."""
        measured = {"steps": steps, **self._summary.values()}
        notes = {"notes": list(self._job.notes)} if self._job.notes else {}
        if self._forward_only:
            notes["forward_only"] = True
        # The plan of a foreign system is that of a resident model.
        planned = self._job.plan.counts() if self._mode.foreign else self._job.plan.summary()
        summary = {"status": status, "reason": reason, **notes, **measured, **planned}
        if summary.get("perf/floor_ms") and "perf/step_ms" in summary:
            summary["perf/floor_ratio"] = summary["perf/step_ms"] / summary["perf/floor_ms"]
        if self._job.checkpoints.best.step is not None:
            summary["checkpoint/best_step"] = self._job.checkpoints.best.step
        if self._save_ms:
            summary.setdefault("checkpoint/save_ms", self._save_ms[-1])
        if self._job.ranks.count > 1:
            summary["devices"] = self._job.ranks.count
            summary |= {f"rank{r}/{name}": v for r, peaks in enumerate(self._rank_peaks) for name, v in peaks.items()}
        self._job.tracker.finish(summary, exit_code=0)
        write_summary(self._run_dir, summary)
        return summary

    def close(self) -> None:
        """Leaves the terminal and the profiler in order, however the run ended."""
        self._tracer.close()
        self._progress.close()

    def _end_trace(self) -> None:
        trace = self._tracer.stop()
        counters = self._job.components.counters()
        self._counters += counters - self._before_trace
        self._traced_steps += 1
        if trace is not None:
            pictures = {"trace/timeline": trace.picture} if trace.picture else {}
            self._job.tracker.log_files(pictures, [trace.trace], trace.step)

    def _seen(self, step: int) -> dict[str, float]:
        blocks = self._job.dataset.num_blocks
        examples = step * self._job.components.config.batch_size
        return {f"train/{self._unit}": self._units} | ({"train/epoch": examples / blocks} if blocks else {})

    def _memory(self, counters: Counters) -> dict[str, float]:
        """Returns the memory of the run: of the GPU that needs most, and of all ranks of the host that needs most."""
        ranks = self._job.ranks.measured(memory_of_rank(self._device, counters, self._job.ranks.home_sharers))
        for peaks, values in zip(self._rank_peaks, ranks, strict=True):
            peaks.update({name: max(value, peaks.get(name, value)) for name, value in values.items()})
        memory = {
            name: max(values[name] for values in ranks)
            if name.startswith("memory/vram")
            else of_largest_host(self._job.ranks.hosts, [values[name] for values in ranks])
            for name in ranks[0]
        }
        if not memory["memory/vram_reserved_gib"] and not memory["memory/vram_peak_gib"]:
            # There is no GPU.
            del memory["memory/vram_peak_gib"], memory["memory/vram_reserved_gib"]
        elif not self._held_warned:
            self._held_warned = warn_of_held(self._job.components.config.vram_budget, memory)
        return memory

    def _speed(self, step_s: float, units: float) -> dict[str, float]:
        """Returns the speed of steps of `step_s` seconds that train on `units`, both means."""
        flops = None if self._forward_only else self._job.plan.model_flops
        if flops:
            # Those of a plan are a full step's. Padding is no work that a model needs.
            flops *= units / self._planned_units
        mfu = (
            {"perf/mfu": flops / step_s / self._peak_flops / self._job.ranks.count}
            if flops and self._peak_flops is not None
            else {}
        )
        return {"perf/step_ms": step_s * 1e3, f"perf/{self._unit}_per_s": units / step_s, **mfu}

    def _write(self, step: int, record: dict) -> None:
        if self._first_loss is not None:
            if step != self._first_step or "train/loss" not in record:
                record[FIRST_LOSS] = self._first_loss.item()
            self._first_loss = None
        self._add(record)
        self._writer.write(record)
        self._job.tracker.log(record, step)
        self._progress.update(step, record)
        note_failures()

    def _add(self, record: dict) -> None:
        self._summary.add(record)
        self._job.checkpoints.best.add(record)
        if "eval/loss" in record:
            self.evaluated_step = record["train/step"]


def memory_of_rank(device: torch.device, counters: Counters, sharers: int) -> dict[str, float]:
    """Returns the memory of this process, in GiB: peaks on its device since the last call, and the host's now.

    Of the host's memory that `sharers` processes share it is this one's part.
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
        "" if allocator.segments_expand() else f", and {allocator.ADVICE}",
    )
    return True


def of_largest_host(hosts: Sequence[int], values: Sequence[float]) -> float:
    """Returns the largest sum of `values`, one of each rank, over the ranks of one host; `hosts` are those of ranks."""
    totals: dict[int, float] = {}
    for host, value in zip(hosts, values, strict=True):
        totals[host] = totals.get(host, 0) + value
    return max(totals.values())


def _traffic(moved: Counters, steps: int) -> dict[str, float]:
    """Returns the metrics of the bytes that `steps` steps moved, as means of a step."""
    # A mode whose copies are not timed has no stall.
    stall = {} if moved.stall_ms is None else {"transfer/stall_ms": moved.stall_ms / steps}
    return {
        "transfer/h2d_gib": moved.h2d_bytes / steps / GIB,
        "transfer/d2h_gib": moved.d2h_bytes / steps / GIB,
        "transfer/activations_h2d_gib": moved.activation_h2d_bytes / steps / GIB,
        "transfer/activations_d2h_gib": moved.activation_d2h_bytes / steps / GIB,
        **_reads(moved, steps),
        **stall,
    }


def _reads(moved: Counters, steps: int) -> dict[str, float]:
    """Returns the metrics of weights that are read from files in every step; none where none are."""
    if not moved.file_bytes:
        return {}
    return {"transfer/files_gib": moved.file_bytes / steps / GIB, "transfer/files_wait_ms": moved.file_wait_ms / steps}


def _updates(moved: Counters, steps: int) -> dict[str, float]:
    """Returns the metrics of the updates that ran beside `steps` steps, as means of a step."""
    rate = moved.updated_parameters / 1e6 / moved.update_ms if moved.update_ms else 0.0
    return {
        "optimizer/host_ms": moved.update_ms / steps,
        "optimizer/wait_ms": moved.update_wait_ms / steps,
        "optimizer/gparams_per_s": rate,
        **_speculation(moved, steps),
    }


def _speculation(moved: Counters, steps: int) -> dict[str, float]:
    """Returns the metrics of updates that began before the norm was known; none where none did."""
    if not moved.speculated_parameters:
        return {}
    return {
        "optimizer/speculated": moved.speculated_parameters / moved.updated_parameters,
        "optimizer/undone": moved.undone_parameters / moved.speculated_parameters,
        "optimizer/undo_ms": moved.undo_ms / steps,
    }
