"""Records the metrics of the logged steps: in metrics.jsonl, in wandb and on the terminal."""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from torch import Tensor

from training.batches import Batch, sha256_of
from training.checkpoints.state import RunState, digest_of_all
from training.metrics.progress import Progress
from training.metrics.routers import router_metrics
from training.metrics.run_summary import FIRST_LOSS, RunSummary
from training.metrics.step_timer import CoreWaits
from training.run.build import Job
from training.run.meters import MemoryMeter, StepMeter
from training.runs.console import note_failures
from training.runs.files import SAMPLES_FILE
from training.runs.records import MetricsWriter, stream_metrics, write_summary
from training.tasks.sample import Sample

logger = logging.getLogger(__name__)


class Recorder:
    """Makes one record of the steps since the last record, and writes it to metrics.jsonl, the console and wandb."""

    def __init__(self, job: Job):
        config, start = job.components.config, job.start
        self._job = job
        self._run_dir = run_dir = job.components.invocation.run_dir
        # A run that starts at its first step makes the evaluation before it, too.
        self._writer = MetricsWriter(run_dir, start.step or -1)
        self._progress = Progress(config.steps, initial_step=start.step)
        self._summary = RunSummary(config.warmup_steps, start.step)
        self.evaluated_step: int | None = None
        for record in stream_metrics(run_dir):
            self._add(record)
        job.checkpoints.best.link()
        self.sampled_step: int | None = None
        self._samples: MetricsWriter | None = None
        if config.sample.every is not None or (run_dir / SAMPLES_FILE).exists():
            self._samples = MetricsWriter(run_dir, start.step or -1, SAMPLES_FILE)
            for record in stream_metrics(run_dir, SAMPLES_FILE):
                self.sampled_step = record["train/step"]
        self._steps = StepMeter(job)
        self._memory = MemoryMeter(job)
        self._skipped_steps = start.skipped_steps
        # The loss of the first step, until it is recorded.
        self._first_loss: Tensor | None = None
        self._save_ms: list[float] = []
        self._core_waits = CoreWaits()

    def start_step(self, step: int) -> None:
        """Starts the timer of `step`, and the profiler if it is to be traced."""
        self._steps.start(step)

    def end_step(self, step: int, units: int, skipped: bool, loss: Tensor) -> None:
        """Ends the step, which trained on `units` tokens, say, and whose last work is queued."""
        self._skipped_steps += skipped
        if self._first_loss is None and not self._summary.has_first_loss:
            self._first_loss = loss
        self._steps.stop(units)
        self._progress.update(step)

    def outside_steps(self) -> AbstractContextManager[None]:
        """Leaves what the mode counts inside the block out of the metrics of steps, but for updates of the last one."""
        return self._steps.paused()

    def record(
        self,
        step: int,
        loss: Tensor,
        norm: float | None,
        lr: float,
        evaluation: Mapping[str, float],
        figures: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Waits for the device; writes the metrics since the last record, of `evaluation`, and the task's `figures`."""
        steps, components = self._steps.metrics(), self._job.components
        record = {
            "train/step": step,
            "train/loss": loss.item(),
            **{f"train/{name}": figure.item() for name, figure in (figures or {}).items()},
            **({} if norm is None else {"train/grad_norm": norm}),
            "train/lr": lr,
            f"train/{components.task.unit}": self._steps.units,
        }
        if blocks := self._job.dataset.num_blocks:
            record["train/epoch"] = step * components.config.batch_size / blocks
        record |= {"train/skipped_steps": self._skipped_steps, **self._memory.metrics(), **evaluation, **steps}
        if self._job.routers:
            record |= router_metrics(self._job.ranks.measured(self._job.routers.sums(), "routers"))
        if self._save_ms:
            record["checkpoint/save_ms"] = sum(self._save_ms)
            self._save_ms.clear()
        self._write(step, record)

    def record_evaluation(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Writes the metrics of an evaluation after a step that is not logged; nothing if there are none."""
        if evaluation:
            self._write(step, {"train/step": step, **evaluation})

    def record_sample(self, step: int, sample: Sample) -> None:
        """Writes and shows a sample after `step`; call it before `record`. Warns if the disk refuses the sample."""
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
        """Saves the run after `step` of `batch`, once it is recorded; returns False if the disk refused it."""
        if self._first_loss is not None:
            self._write(step, {"train/step": step})
        self._writer.sync()
        if self._samples is not None:
            self._samples.sync()
        job = self._job
        state = RunState(
            step=step,
            skipped_steps=self._skipped_steps,
            batch_sha256=sha256_of(batch),
            data_sha256=digest_of_all(job.dataset),
            tracking_id=job.tracker.id,
            eval_sha256=job.evaluation.sha256,
            source_sha256=job.source_sha256,
            task_sha256=job.components.task.files_sha256,
            units=self._steps.units,
        )
        save_ms = job.checkpoints.save(state, required)
        if save_ms is not None:
            self._save_ms.append(save_ms)
        return save_ms is not None

    def finish(self, steps: int, status: str, reason: str | None = None) -> dict:
        """Writes and returns the summary of a run that ends well after `steps` steps."""
        job, mode = self._job, self._job.components.mode
        summary = {"status": status, "reason": reason}
        if notes := (*job.components.settled.notes, *self._core_waits.warn()):
            summary["notes"] = list(notes)
        if "training" in mode.lacks:
            summary["forward_only"] = True
        # The plan of a foreign system is that of a resident model.
        planned = job.plan.counts() if mode.foreign else job.plan.summary()
        summary |= {"steps": steps, **self._summary.values(), **planned}
        if summary.get("perf/floor_ms") and "perf/step_ms" in summary:
            summary["perf/floor_ratio"] = summary["perf/step_ms"] / summary["perf/floor_ms"]
        if job.checkpoints.best.step is not None:
            summary["checkpoint/best_step"] = job.checkpoints.best.step
        if self._save_ms:
            summary.setdefault("checkpoint/save_ms", self._save_ms[-1])
        if job.ranks.count > 1:
            summary["devices"] = job.ranks.count
            for rank, peaks in enumerate(self._memory.peaks):
                summary |= {f"rank{rank}/{name}": value for name, value in peaks.items()}
        job.tracker.finish(summary, exit_code=0)
        write_summary(self._run_dir, summary)
        return summary

    def close(self) -> None:
        """Leaves the terminal and the profiler in order, however the run ended."""
        self._steps.close()
        self._progress.close()

    def _write(self, step: int, record: dict) -> None:
        if self._first_loss is not None:
            if step != self._job.start.step + 1 or "train/loss" not in record:
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
