"""Host memory that this process may use, and what is free of it: the least limit binds, wherever it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.memory import control_groups, host_bytes
from offload.memory.host_bytes import free_host_bytes, usable_host_bytes

MIB = 2**20


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The directory of the outermost of three control groups without limits, on a machine of 1 GiB."""
    monkeypatch.setattr(control_groups, "ROOT", tmp_path / "groups")
    monkeypatch.setattr(control_groups, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(host_bytes, "SYSTEM_MEMORY", tmp_path / "meminfo")
    (tmp_path / "own").write_text("0::/user.slice/run.scope\n")
    (tmp_path / "meminfo").write_text("MemTotal:  1048576 kB\nMemAvailable:  524288 kB\n")
    for name in ("", "user.slice", "user.slice/run.scope"):
        limit(tmp_path / "groups" / name, "max", 0)
    return tmp_path / "groups"


def limit(group: Path, most: int | str, used: int, cached: tuple[int, int] = (0, 0)) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    active, inactive = cached
    (group / "memory.stat").write_text(f"anon 5\nfile 9\ninactive_file {inactive}\nactive_file {active}\n")


def test_this_machine_is_known():
    assert 2**28 < free_host_bytes() < usable_host_bytes()


def test_without_limits_they_are_the_machines(groups: Path):
    assert (usable_host_bytes(), free_host_bytes()) == (1024 * MIB, 512 * MIB)


@pytest.mark.parametrize("name", ["", "user.slice", "user.slice/run.scope"])
def test_a_limit_of_any_group_binds(groups: Path, name: str):
    limit(groups / name, 300 * MIB, used=100 * MIB)
    assert (usable_host_bytes(), free_host_bytes()) == (300 * MIB, 200 * MIB)


def test_the_least_of_several_limits_binds(groups: Path):
    limit(groups, 900 * MIB, used=800 * MIB)
    limit(groups / "user.slice", 300 * MIB, used=10 * MIB)
    limit(groups / "user.slice" / "run.scope", 700 * MIB, used=10 * MIB)
    assert (usable_host_bytes(), free_host_bytes()) == (300 * MIB, 100 * MIB)


def test_a_limit_above_the_machines_memory_changes_nothing(groups: Path):
    limit(groups, 2**40, used=0)
    assert (usable_host_bytes(), free_host_bytes()) == (1024 * MIB, 512 * MIB)


def test_files_in_the_cache_of_a_group_count_as_free(groups: Path):
    limit(groups, 300 * MIB, used=250 * MIB, cached=(20 * MIB, 100 * MIB))
    assert (usable_host_bytes(), free_host_bytes()) == (300 * MIB, 170 * MIB)


def test_a_group_that_is_not_there_does_not_count(groups: Path):
    (groups.parent / "own").write_text("0::/of/the/host\n")
    limit(groups, 300 * MIB, used=0)
    assert usable_host_bytes() == 300 * MIB


def test_nothing_is_known_on_another_system(groups: Path):
    (groups.parent / "meminfo").unlink()
    assert usable_host_bytes() is None
    assert free_host_bytes() is None
