"""The NUMA node of a rank's GPU, on machines that are folders like the kernel's /sys."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from training.parallel import numa
from training.parallel.numa import bind_to_node, gpu_nodes


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of two nodes, of four cores each, with GPUs on both, and one that is on none."""
    files = {
        "devices/system/node/node0/cpulist": "0-3\n",
        "devices/system/node/node1/cpulist": "4,6-7,5\n",
        # Of memory alone.
        "devices/system/node/node2/cpulist": "\n",
        "bus/pci/devices/0000:3b:00.0/numa_node": "0\n",
        "bus/pci/devices/0001:af:00.0/numa_node": "1\n",
        "bus/pci/devices/0000:01:00.0/numa_node": "-1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(numa, "SYSTEM", tmp_path)
    return tmp_path


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """The cores that each thread is bound to; the process may use the cores 1 to 7."""
    found = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(1, 8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: found.update({thread: set(cores)}))
    return found


def test_the_node_of_a_gpu_is_that_of_its_pci_device(system: Path, monkeypatch: pytest.MonkeyPatch):
    def gpu(domain: int, bus: int) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=0)

    # The fourth is not listed, and of the fifth an older torch does not know the address.
    gpus = [gpu(0, 0x3B), gpu(1, 0xAF), gpu(0, 1), gpu(0, 2), SimpleNamespace()]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    assert gpu_nodes(5) == [0, 1, None, None, None]


def test_all_threads_of_a_rank_are_bound_to_its_node(system: Path, bound: dict[int, set[int]]):
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        # Two ranks share the four cores of node 1.
        assert bind_to_node([0, 1, 1], 2) == 2
        assert {other.native_id, threading.main_thread().native_id} <= bound.keys()
    finally:
        done.set()
        other.join()
    assert all(cores == {4, 5, 6, 7} for cores in bound.values())


def test_no_rank_leaves_the_cores_that_the_process_was_given(system: Path, bound: dict[int, set[int]]):
    assert bind_to_node([0, 1], 0) == 3
    assert all(cores == {1, 2, 3} for cores in bound.values())


@pytest.mark.parametrize("nodes", [[1], [None, 1], [7, 1]])
def test_where_there_is_nothing_to_choose_nothing_is_bound(system: Path, bound: dict, nodes: list[int | None]):
    assert bind_to_node(nodes, 0) is None
    assert not bound


def test_on_one_node_nothing_is_bound(system: Path, bound: dict):
    (system / "devices/system/node/node1/cpulist").unlink()
    assert bind_to_node([0, 0], 0) is None
    assert not bound


def test_a_node_without_cores_of_this_process_binds_nothing(system: Path, bound: dict, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {4, 5})
    assert bind_to_node([0, 1], 0) is None
    assert not bound


def test_one_line_of_the_log_says_where_ranks_run(system: Path, bound: dict, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    for rank in range(4):
        bind_to_node([0, 0, 1, None], rank)
    assert caplog.messages == [
        "parallel.numa=auto: local ranks 0, 1 on node 0 (3 cores); 2 on node 1 (4 cores);"
        " 3 on all cores (their GPU's node is not known)"
    ]


def test_the_kernel_s_files_of_this_machine_can_be_read():
    found = numa._cores_by_node()
    assert not found or set.union(*found.values()) >= os.sched_getaffinity(0)
