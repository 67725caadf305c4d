"""The training loop: batches in, gradients by microbatch under the offload mode, one update a step."""

from __future__ import annotations

import math
from contextlib import closing

from hydra.core.hydra_config import HydraConfig
from torch import Tensor

from offload.transfer import upload
from training.build import Job
from training.checkpoints.state import RunState, digest_of, digest_of_all
from training.clock import StepClock
from training.device_memory import device_memory_told
from training.errors import UserError
from training.hardware import (
    peak_flops,
    reset_peaks,
    rss_gib,
    vram_peak_gib,
    vram_reserved_gib,
)
from training.metrics import MetricsWriter, RunFigures, read_metrics, write_summary
from training.progress import Progress
from training.schema import OnNonfinite
from training.step import clip_scale, forward_backward, gradient_norm
from training.stopping import StopRequest
from training.tracing import Tracer
from training.tracking import run_name

GIB = 2**30


def train(job: Job) -> dict:
    """Runs the job to its last step and returns the summary, which is also in the run's directory.

    Metrics are written every `log_every` steps and at the last. The host waits for the device once a step, to know
    the norm of the gradients before the update. Where the run saves itself on signals, one ends it after its step.
    """
    config = job.config
    recorder = Recorder(job)
    job.model.train()
    told = device_memory_told(config, job.plan)
    with closing(recorder), told, StopRequest(enabled=job.checkpoints.on_signal) as stop:
        for step in range(job.start.step + 1, config.steps + 1):
            tokens = job.dataset.batch(step - 1)
            recorder.start_step(step)
            # Before the step: inside, it would queue behind the first weights on the bus.
            batch = upload(tokens, job.device)
            with job.mode.step(norms=True):
                loss = forward_backward(job.mode, job.model, batch, config.microbatches, config.seed, step)
            logged = step % config.log_every == 0 or step == config.steps
            norm = gradient_norm(job.model, job.mode.gradient_norms())
            (lr,) = job.schedule.get_last_lr()[:1]
            if math.isfinite(norm):
                job.optimizer.step(scale=clip_scale(norm, config.clip_norm))
            else:
                recorder.skipped_steps += 1
                skip_or_stop(job, step, norm)
            job.optimizer.zero_grad()
            job.schedule.step()
            if step == job.start.step + 1:
                job.use_spare_vram()
            if step == config.steps:
                # What went wrong in the last update is this run's error too.
                job.optimizer.finish()
            recorder.end_step()
            if logged:
                recorder.record(step, loss, norm, lr)
            if save_or_stop(job, recorder, stop, step, tokens):
                stop.settle()
                return recorder.finish(step, "stopped", f"{stop.signal}: go on with resume={job.checkpoints.latest()}")
        stop.settle()
    return recorder.finish(config.steps, "ok")


def save_or_stop(job: Job, recorder: Recorder, stop: StopRequest, step: int, tokens: Tensor) -> bool:
    """After a step: saves the run where that is due, or where it was asked to stop; returns whether it stops here."""
    last = step == job.config.steps
    saved = job.checkpoints.due(step) and recorder.save(step, tokens, required=last)
    if stop.signal is None or last:
        return False
    if not saved:
        recorder.save(step, tokens, required=True)
    return True


def skip_or_stop(job: Job, step: int, norm: float) -> None:
    """What `on_nonfinite` asks for where gradients are not finite. Raises UserError to end the run."""
    if job.config.on_nonfinite == OnNonfinite.stop:
        raise UserError(
            f"step {step}: the gradient norm is {norm}, and on_nonfinite=stop: take a lower optimizer.lr, warm up"
            " (schedule.warmup), set clip_norm, or leave such steps out with on_nonfinite=skip"
        )
    job.optimizer.skip()


class Recorder:
    """Turns what the loop did since the last logged step into one record of metrics, and sends it everywhere."""

    def __init__(self, job: Job):
        self._clock = StepClock(job.streams)
        self._job = job
        start = job.start
        self._writer = MetricsWriter(job.run_dir, start.step)
        self._progress = Progress(job.config.steps, initial_step=start.step)
        # A run that goes on warms up again.
        self._figures = RunFigures(start.step + job.config.warmup_steps)
        for record in read_metrics(job.run_dir):
            self._figures.add(record)
        self._counters = job.mode.counters()
        self._last_step = start.step
        self._tracer = build_tracer(job)
        self._before_trace: dict[str, float] | None = None
        self._steps_left_out = 0
        self.skipped_steps = start.skipped_steps
        self._save_ms: list[float] = []
        self._peak_flops = peak_flops(job.device, job.dtype)
        self._tokens = job.config.batch_size * job.config.seq_len
        self._flops = self._tokens * job.model.flops_per_token(job.config.seq_len)
        reset_peaks(job.device)

    def start_step(self, step: int) -> None:
        """What follows is part of `step`."""
        self._before_trace = self._job.mode.counters() if self._tracer.start(step) else None
        self._clock.start()

    def end_step(self) -> None:
        """The step is queued to its end. One that was traced, and so slowed down, counts in no figure of speed."""
        if self._before_trace is None:
            self._clock.stop()
            return
        trace = self._tracer.stop()
        counters = self._job.mode.counters()
        self._counters = {key: self._counters[key] + counters[key] - self._before_trace[key] for key in counters}
        self._steps_left_out += 1
        if trace is not None:
            pictures = {"trace/timeline": trace.picture} if trace.picture else {}
            self._job.tracker.log_files(pictures, [trace.trace], trace.step)

    def record(self, step: int, loss: Tensor, norm: float, lr: float) -> None:
        """Waits for the device and writes the metrics of the steps since the last record."""
        times_ms = self._clock.collect()
        counters = self._job.mode.counters()
        record = {
            "train/step": step,
            "train/loss": loss.item(),
            "train/grad_norm": norm,
            "train/lr": lr,
            "train/skipped_steps": self.skipped_steps,
            "memory/vram_peak_gib": vram_peak_gib(self._job.device),
            "memory/vram_reserved_gib": vram_reserved_gib(self._job.device),
            "memory/host_pinned_gib": counters["host_pinned_bytes"] / GIB,
            "memory/rss_gib": rss_gib(),
        }
        # A mode that learns may take less from here on, which a peak of the whole run would hide.
        reset_peaks(self._job.device)
        if times_ms:
            steps = step - self._last_step - self._steps_left_out
            moved = {key: (counters[key] - self._counters[key]) / steps for key in counters}
            record |= self._speed(sum(times_ms) / len(times_ms) / 1e3) | _moved(moved)
        self._counters, self._last_step, self._steps_left_out = counters, step, 0
        if self._save_ms:
            record["checkpoint/save_ms"] = sum(self._save_ms)
            self._save_ms.clear()
        self._figures.add(record)
        self._writer.write(record)
        self._job.tracker.log(record, step)
        self._progress.update(step, record)

    def _speed(self, step_s: float) -> dict[str, float]:
        # Where the peak was measured, on a busy machine too low, a step may prove it wrong.
        self._peak_flops = max(self._peak_flops, self._flops / step_s)
        return {
            "perf/step_ms": step_s * 1e3,
            "perf/tokens_per_s": self._tokens / step_s,
            "perf/mfu": self._flops / step_s / self._peak_flops,
        }

    def close(self) -> None:
        """Leaves the terminal and the profiler as they should be, however the run ended."""
        self._tracer.close()
        self._progress.close()

    def save(self, step: int, tokens: Tensor, required: bool) -> bool:
        """Saves the run after `step`, whose batch was `tokens`; returns whether the disk took it.

        Called when the step has been recorded, so that a run that goes on from there lacks no record.
        """
        self._writer.sync()
        digests = digest_of(tokens), digest_of_all(self._job.dataset)
        state = RunState(step, self.skipped_steps, *digests, self._job.tracker.id)
        save_ms = self._job.checkpoints.save(state, required)
        if save_ms is not None:
            self._save_ms.append(save_ms)
        return save_ms is not None

    def finish(self, steps: int, status: str, reason: str | None = None) -> dict:
        """The summary of a run that ends well after `steps` steps, written last."""
        figures = {"steps": steps, **self._figures.summary()}
        summary = {"status": status, "reason": reason, **figures, **self._job.plan.summary()}
        if summary.get("perf/floor_ms") and "perf/step_ms" in summary:
            summary["perf/floor_ratio"] = summary["perf/step_ms"] / summary["perf/floor_ms"]
        if self._save_ms:
            summary.setdefault("checkpoint/save_ms", self._save_ms[-1])
        self._job.tracker.finish(summary, exit_code=0)
        write_summary(self._job.run_dir, summary)
        return summary


def build_tracer(job: Job) -> Tracer:
    """What traces a step of the run, where that is asked for."""
    title = run_name(HydraConfig.get().runtime.choices, job.config.seed)
    return Tracer(job.config, job.run_dir, job.streams, title, job.start.step)


def _moved(moved: dict[str, float]) -> dict[str, float]:
    """The metrics of what one step moved and of the updates beside it."""
    # A mode whose copies nobody times has no stall.
    stall = {"transfer/stall_ms": moved["stall_ms"]} if "stall_ms" in moved else {}
    return {
        "transfer/h2d_gib": moved["h2d_bytes"] / GIB,
        "transfer/d2h_gib": moved["d2h_bytes"] / GIB,
        "transfer/activations_h2d_gib": moved.get("activation_h2d_bytes", 0) / GIB,
        "transfer/activations_d2h_gib": moved.get("activation_d2h_bytes", 0) / GIB,
        **stall,
        "optimizer/host_ms": moved.get("update_ms", 0.0),
        "optimizer/wait_ms": moved.get("update_wait_ms", 0.0),
        "optimizer/gparams_per_s": _rate(moved),
    }


def _rate(moved: dict[str, float]) -> float:
    """Parameters updated beside the device in a second, in billions."""
    return moved.get("updated_parameters", 0) / 1e6 / moved["update_ms"] if moved.get("update_ms") else 0.0
