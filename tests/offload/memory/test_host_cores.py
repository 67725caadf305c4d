"""The cores that this process may use: its affinity, and the quotas of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload.memory import control_groups
from offload.memory.host_cores import usable_cores


def test_usable_cores_are_at_least_one_and_at_most_all():
    assert 1 <= usable_cores() <= os.cpu_count()


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("1600000 100000", 8), ("unreadable", 8)],
)
def test_a_quota_bounds_the_cores(quota: str, cores: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(Path, "read_text", lambda path: quota)
    assert usable_cores() == cores


def test_without_affinity_it_is_the_number_of_the_machines_cores(monkeypatch: pytest.MonkeyPatch):
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


def test_the_least_quota_of_all_control_groups_binds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/job/step\n")
    (tmp_path / "job" / "step").mkdir(parents=True)
    for name, quota in (("", "600000 100000"), ("job", "200000 100000"), ("job/step", "max 100000")):
        (tmp_path / name / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores() == 2
