"""Runs train.py within the process of a test: a tenth of the time of a new process, which imports everything again."""

import gc
import logging
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache, lru_cache
from io import StringIO
from pathlib import Path

import hydra._internal.utils
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from tests import ROOT
from tests.training.helpers.compositions import Snapshot, remember_options
from training.config import schema
from training.config.validation import check
from training.run.build import build
from training.run.loop import train
from training.runs.directory import RunDirectory
from training.runs.invocation import Invocation
from training.runs.signals import SIGNALS
from training.settle.components import Components
from training.sweeps import launcher

# A model and a batch that take a fraction of a second a step.
SMALL_MODEL = (
    "model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2", "batch_size=4", "device=cpu",
    # A preset, so that no run measures the machine.
    "hardware=h200", "dataset=synthetic",
)  # fmt: skip
# A run of six steps, in a second or two.
TINY_RUN = (
    "model.hidden_size=16", "model.intermediate_size=32", "model.num_hidden_layers=2", "batch_size=4", "seq_len=32",
    "steps=6", "log_every=2", "warmup_steps=1", "device=cpu", "hardware=h200", "tracking=disabled",
    # Reading and encoding text would take most of the time.
    "dataset=synthetic",
)  # fmt: skip
# As many steps of SMALL_MODEL.
SMALL_RUN = (*SMALL_MODEL, "seq_len=64", "steps=6", "log_every=2", "warmup_steps=1")
CONF = ROOT / "conf"

schema.register()
launcher.register_launcher()
remember_options()


@cache
def _reader() -> Hydra:
    """Makes what reads conf/, once."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return GlobalHydra.instance().hydra


@contextmanager
def conf_initialised() -> Iterator[None]:
    """For `hydra.compose` inside the block: as `initialize_config_dir` of conf/, in half the time."""
    reader = _reader()
    before, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, reader
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = before


@lru_cache(100)
def _composed(overrides: tuple[str, ...]) -> Snapshot:
    with conf_initialised():
        return Snapshot(compose("config", list(overrides), return_hydra_config=True))


def composed(*overrides: str, run_dir: Path = Path()) -> tuple[DictConfig, Invocation]:
    """Composes the configuration as `python train.py OVERRIDES` does; the run would write to `run_dir`."""
    config = _composed(overrides).load()
    invocation = Invocation.of(config.hydra, run_dir)
    with open_dict(config):
        del config["hydra"]
    return config, invocation


def components_of(*overrides: str, device: str = "cpu") -> Components:
    """Makes the components of a run that is checked and not built."""
    config, invocation = composed(*overrides)
    check(config)
    return Components.of(config, invocation, torch.device(device))


@contextmanager
def signals_as_before() -> Iterator[None]:
    """Restores the signal handlers: a run that is saved ignores signals until its process ends, here the tests'."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_here(folder: Path, *overrides: str) -> dict:
    """Runs `python train.py` with its files in `folder`; returns the summary, and lets errors through."""
    folder.mkdir(parents=True, exist_ok=True)
    config, invocation = composed(*overrides, run_dir=folder)
    check(config)
    with signals_as_before(), build(config, invocation) as job:
        return train(job)


def saved_run(folder: Path, *overrides: str) -> Path:
    """Does `run_here`, with the configuration's files that `train.py` writes around it; returns `folder`."""
    run_here(folder, *overrides)
    RunDirectory(folder).write_config(*composed(*overrides, run_dir=folder))
    return folder


@contextmanager
def hydra_as_before() -> Iterator[None]:
    """Restores what Hydra and `compose_errors.run` change in a process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hydra._internal.utils, "run_and_report", hydra._internal.utils.run_and_report)
        patch.setattr(HydraConfig.instance(), "cfg", None)
        try:
            yield
        finally:
            for handler in set(root.handlers) - set(handlers):
                handler.close()
            root.handlers[:] = handlers
            root.setLevel(level)


def command_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `python train.py ARGUMENTS`; returns its output and its exit status.

    Not for a sweep, which starts processes with the command line of this one.
    """
    output, errors, status = StringIO(), StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, signals_as_before(), hydra_as_before():
        patch.setattr(sys, "argv", ["train.py", *arguments])
        patch.chdir(ROOT)
        # Its garbage is collected as that of the other tests.
        for name in ("disable", "freeze"):
            patch.setattr(gc, name, lambda: None)
        with redirect_stdout(output), redirect_stderr(errors):
            try:
                runpy.run_path("train.py", run_name="__main__")
            except SystemExit as end:
                status = end.code or 0
    return subprocess.CompletedProcess(["train.py", *arguments], status, output.getvalue(), errors.getvalue())


def train_tiny(folder: Path, *overrides: str, status: int = 0) -> str:
    """Runs `python train.py` on TINY_RUN with its files in `folder`; returns the line that it prints if it fails."""
    result = command_here(*TINY_RUN, *overrides, f"hydra.run.dir={folder}")
    assert result.returncode == status, result.stdout + result.stderr
    assert not status or result.stderr.count("\n") == 1, result.stderr
    return result.stderr
