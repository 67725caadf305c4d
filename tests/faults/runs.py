"""Runs of a tiny model in forked processes, and the uninterrupted run to which their results must be equal.

A fork has imported everything, and has its configuration and its plan, so it takes half a second where a new process
takes five. It runs the whole `main` of train.py.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import torch
import torch._dynamo
from omegaconf import DictConfig, OmegaConf

import train
import training.metrics.progress
import training.run.loop
import training.run.prepare
from offload.modes import tensor_swap
from tests.training.helpers.in_process import TINY_RUN, composed
from tests.training.helpers.modes import small_modes
from tests.training.helpers.results import content, curve
from training.planning.machine import machine_of
from training.planning.plan import plan_run
from training.planning.report import RunPlan
from training.runs.checkpoint_files import DamagedError, checkpoints_in, partials_in, read_manifest, step_of, verify
from training.runs.files import CHECKPOINTS_FOLDER, METRICS_FILE
from training.runs.invocation import Invocation
from training.settle.components import Components

tensor_swap.MIN_BYTES = 1024

# No clipping: with it host_adamw rounds another way. A checkpoint of this model has more than 64 blocks of a disk.
RUN = (
    *TINY_RUN, "model.hidden_size=32", "model.intermediate_size=64", "dataset=synthetic", "microbatches=2",
    "clip_norm=null", "log_every=1", "checkpoint.every=1", "resume=auto",
)  # fmt: skip
OPTIMIZERS = {"adamw": ("optimizer=adamw",), "host_adamw": ("optimizer=host_adamw",)}
RESIDENT = ("offload=none", "optimizer=adamw")
# Longer than any of these runs takes on a busy machine.
LIMIT_S = 120


@dataclass(frozen=True)
class Ended:
    """The end of a run.

    Attributes:
        status: its exit status; -9 if a SIGKILL ended it, None if it had to be killed after LIMIT_S.
        output: what it printed.
    """

    status: int | None
    output: str

    def problem(self, wanted: int = 0) -> str | None:
        """Returns in one line that the run did not end with the status `wanted`, None if it did."""
        if self.status == wanted:
            return None
        last = self.output.strip().splitlines()[-1:] or ["without a word"]
        return f"the run {'hung' if self.status is None else f'ended with status {self.status}'}: {last[0]}"


@cache
def planned(overrides: tuple[str, ...]) -> tuple[DictConfig, Invocation, RunPlan]:
    """Composes and plans runs once; their numbers of steps do not matter to it."""
    config, invocation = composed(*RUN, *overrides)
    components = Components.of(config, invocation, torch.device("cpu"))
    plan = plan_run(components, machine_of(components), has_gpu=False)
    # A garbage collection in a fork would write to every object, and copy all of this process's memory.
    gc.collect()
    gc.freeze()
    return config, invocation, plan


def modes_and_optimizers(seed: int) -> Iterator[tuple[str, ...]]:
    """Yields the overrides of offload modes with optimizers for ever: every pair once before any comes again."""
    choices = random.Random(seed)
    modes = [(f"offload={mode}", *knobs) for mode, knobs in small_modes().items()]
    pairs = [(*mode, *optimizer) for mode, optimizer in product(modes, OPTIMIZERS.values())]
    while True:
        yield from choices.sample(pairs, len(pairs))


def start(
    run_dir: Path,
    overrides: tuple[str, ...],
    steps: int,
    keys: Mapping[str, object] | None = None,
    before: Callable[[], object] = lambda: None,
) -> int:
    """Starts `python train.py OVERRIDES steps=STEPS` in a process of its own; returns its number.

    `keys` are more values of the configuration. The process first calls `before`.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    config, invocation, plan = planned(overrides)
    _wait_for_threads()
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        for key, value in {"steps": steps, **(keys or {})}.items():
            OmegaConf.update(config, key, value)
        _run(config, replace(invocation, run_dir=run_dir), plan, _output_of(run_dir), before)
    return process


def wait(process: int, run_dir: Path, limit_s: float = LIMIT_S) -> Ended:
    """Waits until the run in `run_dir` has ended, and kills it if that takes longer than `limit_s`."""
    deadline = time.monotonic() + limit_s
    while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.002)
    late = ended == (0, 0)
    if late:
        os.kill(process, signal.SIGKILL)
        ended = os.waitpid(process, 0)
    output = _output_of(run_dir).read_text(errors="replace") if _output_of(run_dir).exists() else ""
    return Ended(None if late else os.waitstatus_to_exitcode(ended[1]), output)


def run(run_dir: Path, overrides: tuple[str, ...], steps: int, **arguments) -> Ended:
    """Runs `python train.py OVERRIDES steps=STEPS` to its end; the arguments are those of `start`."""
    return wait(start(run_dir, overrides, steps, **arguments), run_dir)


def newest(run_dir: Path) -> int:
    """Returns the step of the newest checkpoint, 0 if there is none."""
    found = checkpoints_in(run_dir / CHECKPOINTS_FOLDER)
    return step_of(found[0]) if found else 0


@dataclass(frozen=True)
class Whole:
    """The results of a run that nothing interrupted.

    Attributes:
        contents: the hashes of each checkpoint's files, by step.
        records: the records of its steps, without measured values.
    """

    contents: dict[int, dict[str, str]]
    records: list[dict]

    @classmethod
    def of(cls, run_dir: Path, steps: int) -> Whole:
        """Makes such a run in `run_dir`."""
        ended = run(run_dir, RESIDENT, steps, keys={"checkpoint.keep": steps})
        if problem := ended.problem():
            raise RuntimeError(problem)
        folders = checkpoints_in(run_dir / CHECKPOINTS_FOLDER)
        return cls({step_of(folder): content(folder) for folder in folders}, curve(run_dir))

    def problem(self, run_dir: Path, steps: int | None = None) -> str | None:
        """Returns in one line in what the results in `run_dir` are damaged or differ; None if they are good.

        A run with `steps` has been completed, with that many.
        """
        for folder in checkpoints_in(run_dir / CHECKPOINTS_FOLDER):
            try:
                verify(folder, read_manifest(folder))
            except DamagedError as error:
                return str(error)
            found, wanted = content(folder), self.contents[step_of(folder)]
            if differing := [name for name in wanted if found.get(name) != wanted[name]]:
                return f"{folder} differs from the uninterrupted run in {', '.join(differing)}"
        records = curve(run_dir) if (run_dir / METRICS_FILE).exists() else []
        if records != self.records[: len(records)]:
            return f"{run_dir / METRICS_FILE} differs from the uninterrupted run's"
        if steps is None:
            return None
        if (newest(run_dir), len(records)) != (steps, steps):
            return f"{run_dir} has {len(records)} records and a checkpoint at step {newest(run_dir)} of {steps}"
        leftovers = partials_in(run_dir / CHECKPOINTS_FOLDER)
        return f"{leftovers[0]} was left" if leftovers else None


def _wait_for_threads() -> None:
    """Waits for threads that were joined and have not quite ended: a lock that one holds would stay locked in a fork.

    Raises RuntimeError if this process has threads that do not end.
    """
    deadline = time.monotonic() + 60
    while len(threads := os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            raise RuntimeError(f"this process has {len(threads)} threads, so that it cannot be forked")
        time.sleep(0.001)


def _output_of(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.log")


def _run(config: DictConfig, invocation: Invocation, plan: RunPlan, output: Path, before: Callable[[], object]) -> None:
    """Runs in this process, a fork, and ends it."""
    status = 1
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        torch.set_num_threads(1)
        logging.basicConfig(level=logging.WARNING, format="warning: %(message)s", force=True)
        Invocation.current = lambda: invocation
        training.run.prepare.plan_filled = lambda components, *_, **__: (components, plan)
        before()
        train.main.__wrapped__(config)
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        # Nothing may return into the code of the parent.
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
