"""Memory and cores that this process may use: the least limit binds, wherever it is; and the free memory of a GPU."""

import os
from pathlib import Path

import pytest
import torch

from offload.memory import limits
from offload.memory.limits import control_groups, free_device_bytes, free_host_bytes, usable_cores, usable_host_bytes

MIB = 2**20


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The directory of the outermost of three control groups without limits, on a machine of 1 GiB and 8 cores."""
    monkeypatch.setattr(limits, "ROOT", tmp_path / "groups")
    monkeypatch.setattr(limits, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(limits, "SYSTEM_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
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
    assert 1 <= usable_cores() <= os.cpu_count()


def test_without_limits_they_are_the_machines(groups: Path):
    assert (usable_host_bytes(), free_host_bytes(), usable_cores()) == (1024 * MIB, 512 * MIB, 8)


@pytest.mark.parametrize("name", ["", "user.slice", "user.slice/run.scope"])
def test_a_limit_of_any_group_binds(groups: Path, name: str):
    limit(groups / name, 300 * MIB, used=100 * MIB)
    (groups / name / "cpu.max").write_text("250000 100000\n")
    assert (usable_host_bytes(), free_host_bytes(), usable_cores()) == (300 * MIB, 200 * MIB, 3)


def test_the_least_of_several_limits_binds(groups: Path):
    limit(groups, 900 * MIB, used=800 * MIB)
    limit(groups / "user.slice", 300 * MIB, used=10 * MIB)
    limit(groups / "user.slice" / "run.scope", 700 * MIB, used=10 * MIB)
    for name, quota in (("", "600000 100000"), ("user.slice", "50000 100000"), ("user.slice/run.scope", "max 100000")):
        (groups / name / "cpu.max").write_text(quota)
    assert (usable_host_bytes(), free_host_bytes(), usable_cores()) == (300 * MIB, 100 * MIB, 1)


def test_a_limit_above_what_the_machine_has_changes_nothing(groups: Path):
    limit(groups, 2**40, used=0)
    (groups / "cpu.max").write_text("1600000 100000")
    assert (usable_host_bytes(), free_host_bytes(), usable_cores()) == (1024 * MIB, 512 * MIB, 8)


def test_files_in_the_cache_of_a_group_count_as_free(groups: Path):
    limit(groups, 300 * MIB, used=250 * MIB, cached=(20 * MIB, 100 * MIB))
    assert (usable_host_bytes(), free_host_bytes()) == (300 * MIB, 170 * MIB)
    assert [free_host_bytes(enough=left * MIB) for left in (50, 51)] == [50 * MIB, 170 * MIB]


@pytest.mark.parametrize(
    ("own", "inner"),
    [
        ("0::/user.slice/run.scope\n", ["user.slice", "user.slice/run.scope"]),
        ("3:memory:/other\n0::/job_7\n", ["job_7"]),
        ("0::/\n", []),
        ("3:memory:/other\n", []),
        (None, []),
    ],
)
def test_groups_go_from_the_outermost_to_the_innermost(groups: Path, own: str | None, inner: list[str]):
    (groups.parent / "own").unlink()
    if own is not None:
        (groups.parent / "own").write_text(own)
    assert control_groups() == [groups, *(groups / name for name in inner)]


def test_on_another_system_the_cores_alone_are_known(groups: Path, monkeypatch: pytest.MonkeyPatch):
    (groups.parent / "meminfo").unlink()
    assert usable_host_bytes() is None
    assert free_host_bytes() is None
    monkeypatch.delattr(os, "sched_getaffinity")
    for count, cores in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert usable_cores() == cores


def test_memory_of_a_gpu_that_the_allocator_holds_for_nobody_is_free(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    assert free_device_bytes(torch.device("cuda")) == 1070
    assert free_device_bytes(torch.device("cpu")) is None
