"""The training loop: batches in, gradients by microbatch under the offload mode, one update a step."""

from __future__ import annotations

import math

from torch import Tensor

from offload.transfer import upload
from training.build import Job
from training.clock import StepClock
from training.errors import UserError
from training.hardware import (
    peak_flops,
    reset_peaks,
    rss_gib,
    vram_peak_gib,
    vram_reserved_gib,
)
from training.metrics import MetricsWriter, summarise, write_summary
from training.progress import Progress
from training.schema import OnNonfinite
from training.step import clip_scale, forward_backward, gradient_norm

GIB = 2**30


def train(job: Job) -> dict:
    """Runs the job to its last step and returns the summary, which is also in the run's directory.

    Metrics are written every `log_every` steps and at the last. The host waits for the device once a step, to know
    the norm of the gradients before the update.
    """
    config = job.config
    recorder = Recorder(job)
    job.model.train()
    try:
        for step in range(1, config.steps + 1):
            batch = job.dataset.batch(step - 1)
            recorder.clock.start()
            # Before the step: inside, it would queue behind the first weights on the bus.
            batch = upload(batch, job.device)
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
            if step == 1:
                job.use_spare_vram()
            if step == config.steps:
                # What went wrong in the last update is this run's error too.
                job.optimizer.finish()
            recorder.clock.stop()
            if logged:
                recorder.record(step, loss, norm, lr)
    finally:
        recorder.close()
    return recorder.finish()


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
        self.clock = StepClock(job.streams)
        self._job = job
        self._writer = MetricsWriter(job.run_dir)
        self._progress = Progress(job.config.steps)
        self._records: list[dict] = []
        self._counters = job.mode.counters()
        self._last_step = 0
        self.skipped_steps = 0
        self._peak_flops = peak_flops(job.device, job.dtype)
        self._tokens = job.config.batch_size * job.config.seq_len
        self._flops = self._tokens * job.model.flops_per_token(job.config.seq_len)
        reset_peaks(job.device)

    def record(self, step: int, loss: Tensor, norm: float, lr: float) -> None:
        """Waits for the device and writes the metrics of the steps since the last record."""
        times_ms = self.clock.collect()
        step_s = sum(times_ms) / len(times_ms) / 1e3
        # Where the peak was measured, on a busy machine too low, a step may prove it wrong.
        self._peak_flops = max(self._peak_flops, self._flops / step_s)
        counters, steps = self._job.mode.counters(), step - self._last_step
        moved = {key: (counters[key] - self._counters[key]) / steps for key in counters}
        self._counters, self._last_step = counters, step
        record = {
            "train/step": step,
            "train/loss": loss.item(),
            "train/grad_norm": norm,
            "train/lr": lr,
            "train/skipped_steps": self.skipped_steps,
            "perf/step_ms": step_s * 1e3,
            "perf/tokens_per_s": self._tokens / step_s,
            "perf/mfu": self._flops / step_s / self._peak_flops,
            "memory/vram_peak_gib": vram_peak_gib(self._job.device),
            "memory/vram_reserved_gib": vram_reserved_gib(self._job.device),
            "memory/host_pinned_gib": counters["host_pinned_bytes"] / GIB,
            "memory/rss_gib": rss_gib(),
            "transfer/h2d_gib": moved["h2d_bytes"] / GIB,
            "transfer/d2h_gib": moved["d2h_bytes"] / GIB,
            "transfer/activations_h2d_gib": moved.get("activation_h2d_bytes", 0) / GIB,
            "transfer/activations_d2h_gib": moved.get("activation_d2h_bytes", 0) / GIB,
            "transfer/stall_ms": moved["stall_ms"],
            "optimizer/host_ms": moved.get("update_ms", 0.0),
            "optimizer/wait_ms": moved.get("update_wait_ms", 0.0),
            "optimizer/gparams_per_s": _rate(moved),
        }
        self._records.append(record)
        self._writer.write(record)
        self._job.tracker.log(record, step)
        self._progress.update(step, record)

    def close(self) -> None:
        """Leaves the terminal as it should be, however the run ended."""
        self._progress.close()

    def finish(self) -> dict:
        """The summary of a run that reached its end, written last."""
        config = self._job.config
        summary = summarise(self._records, warmup_steps=config.warmup_steps, total_steps=config.steps)
        summary = {"status": "ok", "reason": None, **summary}
        self._job.tracker.finish(summary, exit_code=0)
        write_summary(self._job.run_dir, summary)
        return summary


def _rate(moved: dict[str, float]) -> float:
    """Parameters updated beside the device in a second, in billions."""
    return moved.get("updated_parameters", 0) / 1e6 / moved["update_ms"] if moved.get("update_ms") else 0.0
