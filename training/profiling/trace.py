"""Records one step of a run with torch's profiler: a trace and a picture of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import DictConfig

from offload import Streams
from training.errors import first_line
from training.profiling.timeline import draw_chart, read_timeline
from training.runs.files import TRACE_FOLDER

logger = logging.getLogger(__name__)

VIEWER = "https://ui.perfetto.dev"


class StepTrace(NamedTuple):
    """The files of a traced step: in Chrome's trace event format, compressed, and a PNG, None if drawing failed."""

    step: int
    trace: Path
    picture: Path | None


class Tracer:
    """Traces one step of a run. Errors never stop the run: each becomes one warning.

    Args:
        title: of the picture.
        steps_done: the step after which the run resumes; it warms up again from there.
    """

    def __init__(self, config: DictConfig, run_dir: Path, streams: Streams, title: str, steps_done: int = 0):
        self.step = step_to_trace(config, steps_done)
        self._run_dir = run_dir
        self._streams = streams
        self._title = title
        self._profiling = ExitStack()
        self._trace = run_dir / TRACE_FOLDER / f"step-{self.step}.json.gz"

    def start(self, step: int) -> bool:
        """Starts recording if `step` is the step to trace; call it before the step. Returns True while recording."""
        if step != self.step:
            return False
        try:
            self._trace.parent.mkdir(exist_ok=True)
            self._profiling.enter_context(tracing(self._trace, self._streams))
        except Exception as error:  # profilers, drivers and disks fail in many ways, and none is worth losing a run
            self._warn(error)
            return False
        return True

    def stop(self) -> StepTrace | None:
        """Ends the recording after that step, and writes and draws it. Returns None, with a warning, on failure."""
        try:
            self._profiling.close()
        except Exception as error:
            return self._warn(error)
        picture: Path | None = self._trace.with_name(f"step-{self.step}.png")
        try:
            draw_chart(read_timeline(self._trace), picture, f"{self._title}, step {self.step}")
        except Exception as error:
            logger.warning("trace=true: drawing step %d failed (%s)", self.step, first_line(error))
            picture = None
        logger.info("trace: step %d in %s; open it in %s", self.step, self._trace, VIEWER)
        return StepTrace(self.step, self._trace, picture)

    def close(self) -> None:
        """Discards a recording whose step failed."""
        with suppress(Exception), self._profiling:
            raise InterruptedError

    def _warn(self, error: Exception) -> None:
        logger.warning("trace=true: tracing step %d failed (%s); the run continues", self.step, first_line(error))


def step_to_trace(config: DictConfig, steps_done: int = 0) -> int | None:
    """Returns the step that a run records, the first after the warm-up; None without `trace`."""
    return min(steps_done + config.warmup_steps + 1, config.steps) if config.trace else None


@contextmanager
def tracing(path: Path, streams: Streams) -> Iterator[None]:
    """Profiles the `with` block, in all threads, and writes the trace to `path` (compressed if that ends in .gz).

    The device is idle at the start and at the end, so that the trace contains all work of the block and no other. If
    the block raises, no trace is written.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if streams.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # Otherwise the profiler prints to the terminal when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # Without it, the trace would lack the optimizer's thread, which autograd does not know.
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    profile = torch.profiler.profile(activities=activities, experimental_config=threads)
    streams.synchronize()
    with profile:
        yield
        streams.synchronize()
    # Renamed when complete, so that a file under the final name is always whole.
    partial = path.with_name(f"partial-{path.name}")
    profile.export_chrome_trace(str(partial))
    partial.replace(path)
