"""The training loop: batches in, gradients by microbatch under the offload mode, one update a step."""

from __future__ import annotations

from torch import Tensor

from offload.transfer import upload
from training.build import Job
from training.clock import StepClock
from training.hardware import (
    peak_flops,
    reset_peaks,
    rss_gib,
    vram_peak_gib,
    vram_reserved_gib,
)
from training.metrics import MetricsWriter, summarise, write_summary
from training.progress import Progress
from training.step import forward_backward, gradient_norm

GIB = 2**30


def train(job: Job) -> dict:
    """Runs the job to its last step and returns the summary, which is also in the run's directory.

    Metrics are written every `log_every` steps and at the last; only there does the host wait for the device.
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
            with job.mode.step():
                loss = forward_backward(job.model, batch, config.microbatches)
            logged = step % config.log_every == 0 or step == config.steps
            norm = gradient_norm(job.model, config.clip_norm, wanted=logged)
            job.optimizer.step()
            job.optimizer.zero_grad()
            recorder.clock.stop()
            if logged:
                recorder.record(step, loss, norm)
    finally:
        recorder.close()
    return recorder.finish()


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
        self._peak_flops = peak_flops(job.device, job.dtype)
        self._tokens = job.config.batch_size * job.config.seq_len
        self._flops = self._tokens * job.model.flops_per_token(job.config.seq_len)
        reset_peaks(job.device)

    def record(self, step: int, loss: Tensor, norm: Tensor) -> None:
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
            "train/grad_norm": norm.item(),
            "perf/step_ms": step_s * 1e3,
            "perf/tokens_per_s": self._tokens / step_s,
            "perf/mfu": self._flops / step_s / self._peak_flops,
            "memory/vram_peak_gib": vram_peak_gib(self._job.device),
            "memory/vram_reserved_gib": vram_reserved_gib(self._job.device),
            "memory/host_pinned_gib": counters["host_pinned_bytes"] / GIB,
            "memory/rss_gib": rss_gib(),
            "transfer/h2d_gib": moved["h2d_bytes"] / GIB,
            "transfer/d2h_gib": moved["d2h_bytes"] / GIB,
            "transfer/stall_ms": moved["stall_ms"],
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
