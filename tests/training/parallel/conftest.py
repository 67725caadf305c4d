"""Runs on several devices within the process of a test, which is rank 0: only the other ranks are started."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import run_processes
from tests.training.helpers.in_process import TINY_RUN, composed, signals_as_before
from tests.training.helpers.ranks import forked_ranks
from training.config.validation import check
from training.parallel.launch import connected
from training.parallel.ranks import Ranks
from training.run.build import build
from training.run.loop import train

# Small enough that rank 0 computes it in a second.
RUN = (*TINY_RUN, "eval.every=3", "eval.batches=2", "checkpoint.every=2", "checkpoint.keep=9", "log_every=1")


def run_ranks(
    folder: Path,
    *overrides: str,
    watch: Callable[[Ranks], None] = lambda ranks: None,
    run: Sequence[str] = RUN,
    new_processes: bool = False,
) -> dict:
    """Runs `python train.py RUN OVERRIDES` with its files in `folder`; calls `watch` once the ranks are connected.

    With `new_processes` ranks are started as a run starts them, and what they print is that of the test.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, invocation = composed(*run, *overrides, run_dir=folder)
    check(config)
    with signals_as_before(), nullcontext() if new_processes else forked_ranks(), connected(config, None) as ranks:
        watch(ranks)
        with build(config, invocation, ranks=ranks) as job:
            return train(job)


def forked(work: Callable[[int, Path, int], None], folder: Path, count: int, start_method: str = "fork") -> list:
    """Calls `work` in a process for each rank; returns what each has saved.

    A process that uses a GPU needs `start_method="spawn"`, which imports everything again.
    """
    run_processes(work, [(rank, folder, count) for rank in range(count)], start_method, 300)
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


def exchanged(work: Callable[[int], Any], folder: Path, count: int) -> list:
    """Calls `work` in a process for each rank of a group over gloo; returns what each has returned."""
    return forked(partial(_in_group, work), folder, count)


def _in_group(work: Callable[[int], Any], rank: int, folder: Path, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), count), rank=rank, world_size=count)
    torch.save(work(rank), folder / f"{rank}.pt")
    dist.destroy_process_group()
