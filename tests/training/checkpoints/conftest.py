"""Runs of a tiny model within this process, with checkpoints."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.helpers import results
from tests.training.helpers.in_process import TINY_RUN, run_here
from training.runs.files import SUMMARY_FILE

TINY = (*TINY_RUN, "dataset=stdlib", "dataset.max_tokens=20000", "checkpoint.every=3")


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """The overrides of a run that takes seconds."""
    return TINY


@pytest.fixture(scope="session", name="run_here")
def run_tiny() -> Callable[..., dict]:
    """Runs `python train.py` of a tiny model with more overrides in this process, and lets errors through."""

    def run_tiny(folder: Path, *overrides: str) -> dict:
        return run_here(folder, *TINY, *overrides)

    return run_tiny


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory: pytest.TempPathFactory, run_here) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    run_here(run_dir)
    return run_dir


@pytest.fixture
def finished(tmp_path: Path, finished_once: Path) -> Path:
    """The directory of a run of six steps, saved after the third and the last."""
    return shutil.copytree(finished_once, tmp_path / "run")


@pytest.fixture(scope="session")
def at() -> Callable[[Path, int], Path]:
    """Returns the checkpoint of a run after a step."""
    return lambda run_dir, step: run_dir / "checkpoints" / f"step-{step:08d}"


@pytest.fixture(scope="session")
def content() -> Callable[[Path], dict[str, str]]:
    return results.content


@pytest.fixture(scope="session")
def curve() -> Callable[[Path], list[dict]]:
    return results.curve


@pytest.fixture
def killed_after(finished: Path, tmp_path: Path) -> Callable[[int], Path]:
    """Returns a run's directory as if it had been killed some time after a step's checkpoint and record."""

    def killed_after(step: int) -> Path:
        folder = tmp_path / f"killed-{step}"
        shutil.copytree(finished, folder)
        # A run removes it when it begins.
        (folder / SUMMARY_FILE).unlink()
        for checkpoint in (folder / "checkpoints").iterdir():
            if int(checkpoint.name[5:]) > step:
                shutil.rmtree(checkpoint)
        return folder

    return killed_after
