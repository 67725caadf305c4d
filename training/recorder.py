"""What the loop records: metrics of the logged steps, in every place where they go."""

from __future__ import annotations

from hydra.core.hydra_config import HydraConfig
from torch import Tensor

from offload.runtime.byte_sizes import GIB
from offload.runtime.counters import Counters
from training.build import Job
from training.checkpoints.state import RunState, digest_of, digest_of_all
from training.metrics.files import MetricsWriter, read_metrics, write_summary
from training.metrics.progress import Progress
from training.metrics.run_summary import RunFigures
from training.metrics.step_timer import StepTimer
from training.metrics.wandb_tracker import run_name
from training.profiling.hardware import peak_flops, reset_peaks, rss_gib, vram_peak_gib, vram_reserved_gib
from training.profiling.trace import Tracer


class Recorder:
    """Turns what the loop did since the last logged step into one record of metrics, and sends it everywhere."""

    def __init__(self, job: Job):
        self._clock = StepTimer(job.streams)
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
        self._before_trace: Counters | None = None
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
        self._counters += self._job.mode.counters() - self._before_trace
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
            "memory/host_pinned_gib": counters.host_pinned_bytes / GIB,
            "memory/rss_gib": rss_gib(),
        }
        # A mode that learns may take less from here on, which a peak of the whole run would hide.
        reset_peaks(self._job.device)
        if times_ms:
            steps = step - self._last_step - self._steps_left_out
            record |= self._speed(sum(times_ms) / len(times_ms) / 1e3) | _moved(counters - self._counters, steps)
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


def _moved(moved: Counters, steps: int) -> dict[str, float]:
    """The metrics of the copies and of the host's updates in `steps` steps, each as the mean of a step."""
    # A mode whose copies nobody times has no stall.
    stall = {} if moved.stall_ms is None else {"transfer/stall_ms": moved.stall_ms / steps}
    return {
        "transfer/h2d_gib": moved.h2d_bytes / steps / GIB,
        "transfer/d2h_gib": moved.d2h_bytes / steps / GIB,
        "transfer/activations_h2d_gib": moved.activation_h2d_bytes / steps / GIB,
        "transfer/activations_d2h_gib": moved.activation_d2h_bytes / steps / GIB,
        **stall,
        "optimizer/host_ms": moved.update_ms / steps,
        "optimizer/wait_ms": moved.update_wait_ms / steps,
        # Parameters updated beside the device in a second, in billions.
        "optimizer/gparams_per_s": moved.updated_parameters / 1e6 / moved.update_ms if moved.update_ms else 0.0,
    }
