"""One step of a run under torch's profiler: its trace, and the picture of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig

from offload.runtime.registry import Streams
from training.errors import first_line
from training.profiling.timeline import draw, read_timeline
from training.runs.files import TRACE_FOLDER

logger = logging.getLogger(__name__)


VIEWER = "https://ui.perfetto.dev"


@dataclass(frozen=True)
class StepTrace:
    """What is left of a traced step: two files in the run's directory."""

    step: int
    trace: Path
    """Chrome's trace event format, gzip'd"""
    picture: Path | None
    """PNG; None where it could not be drawn"""


class Tracer:
    """Traces one step of a run, and never stops it: what goes wrong is one warning.

    `streams` are the run's; `title` stands over the picture; a run that goes on after `steps_done` warms up again.
    """

    def __init__(self, config: DictConfig, run_dir: Path, streams: Streams, title: str, steps_done: int = 0):
        self.step = step_to_trace(config, steps_done)
        self._run_dir = run_dir
        self._streams = streams
        self._title = title
        self._profiling = ExitStack()
        self._trace = run_dir / TRACE_FOLDER / f"step-{self.step}.json.gz"

    def start(self, step: int) -> bool:
        """Before a step: whether it is the one, and is being recorded from now on."""
        if step != self.step:
            return False
        try:
            self._trace.parent.mkdir(exist_ok=True)
            self._profiling.enter_context(recorded(self._trace, self._streams))
        except Exception as error:  # profilers, their drivers and disks fail in many ways, none worth a run
            self._give_up(error)
            return False
        return True

    def stop(self) -> StepTrace | None:
        """After that step: its trace, written and drawn; None where that failed, with a warning."""
        try:
            self._profiling.close()
        except Exception as error:
            return self._give_up(error)
        picture: Path | None = self._trace.with_name(f"step-{self.step}.png")
        try:
            draw(read_timeline(self._trace), picture, f"{self._title}, step {self.step}")
        except Exception as error:
            logger.warning("trace=true: step %d is not drawn (%s)", self.step, first_line(error))
            picture = None
        logger.info("trace: step %d in %s, for %s", self.step, self._trace, VIEWER)
        return StepTrace(self.step, self._trace, picture)

    def close(self) -> None:
        """Ends a recording whose step did not come to its end."""
        with suppress(Exception), self._profiling:
            raise InterruptedError

    def _give_up(self, error: Exception) -> None:
        logger.warning("trace=true: step %d is not traced (%s); the run goes on", self.step, first_line(error))


def step_to_trace(config: DictConfig, steps_done: int = 0) -> int | None:
    """The step that a run records: `trace_step`, or the first after the warm-up; None without `trace`."""
    if not config.trace:
        return None
    if config.trace_step is not None:
        return config.trace_step
    return min(steps_done + config.warmup_steps + 1, config.steps)


@contextmanager
def recorded(path: Path, streams: Streams) -> Iterator[None]:
    """Profiles what the block and the threads beside it do, and writes the trace to `path`, gzip'd if it ends so.

    It begins and ends with the device idle, so that the trace holds the block's work, whole.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if streams.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # It says on the terminal when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # The optimizer's thread too, which is none of autograd's.
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    profile = torch.profiler.profile(activities=activities, experimental_config=threads)
    streams.synchronize()
    with profile:
        yield
        streams.synchronize()
    # Aside first: a name that is there is a file that is whole.
    partial = path.with_name(f"partial-{path.name}")
    profile.export_chrome_trace(str(partial))
    partial.replace(path)
