"""The directories of runs that start in the same second."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from omegaconf import OmegaConf

from tests import ROOT
from training.runs.fresh_directory import fresh_directory, register


def test_each_of_many_gets_a_directory_of_its_own(tmp_path: Path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(fresh_directory, [str(tmp_path / "day" / "second")] * 8))
    assert sorted(made) == sorted(
        str(tmp_path / "day" / name) for name in ("second", *(f"second-{number}" for number in range(2, 9)))
    )
    assert all(Path(path).is_dir() for path in made)


def test_a_place_where_nothing_can_be_made_is_left_to_who_writes_there(tmp_path: Path):
    (tmp_path / "file").touch()
    assert fresh_directory(str(tmp_path / "file" / "second")) == str(tmp_path / "file" / "second")


def test_all_readers_of_a_configuration_get_one_directory(tmp_path: Path):
    register()
    config = OmegaConf.create({"day": str(tmp_path), "dir": "${fresh:${day}/second}"})
    assert config.dir == config.dir == config.copy().dir == str(tmp_path / "second")
    assert OmegaConf.create({"day": str(tmp_path), "dir": "${fresh:${day}/second}"}).dir == str(tmp_path / "second-2")


def test_a_run_makes_one_directory_and_help_makes_none(tmp_path: Path):
    assert _directories(tmp_path, "--cfg", "job") == []
    assert len(_directories(tmp_path, "steps=0")) == 1


def _directories(folder: Path, *arguments: str) -> list[Path]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=300)
    return sorted(folder.glob("outputs/*/*"))
