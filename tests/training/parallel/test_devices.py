"""The device of a rank, and its part of the cores: those of its GPU's node."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.training.helpers.in_process import composed
from training.config.validation import check
from training.errors import UserError
from training.parallel import devices
from training.parallel.devices import bind_to_node, device_of, gpu_nodes, share_cores, take_seat
from training.parallel.world import World


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_each_rank_has_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch):
    chosen = []
    monkeypatch.setattr(devices, "resolve_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert device_of("auto", 2, 1) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    with pytest.raises(UserError, match=r"^devices=3: torch finds 2"):
        device_of("auto", 3, 1)


def test_ranks_of_several_hosts_have_the_gpus_and_cores_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "resolve_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(devices, "usable_cores", lambda: 16)
    # Rank 3 of 4, the second of the second host.
    world = World(3, 4, local_rank=1, local_size=2, host=1, hosts=2)
    # Of the GPU's node it has three cores; of more than its part of all it takes none.
    monkeypatch.setattr(devices, "gpu_nodes", lambda count: [0, 1][:count])
    for bound, cores in ((3, 3), (12, 8), (None, 8)):
        monkeypatch.setattr(devices, "bind_to_node", lambda nodes, rank, bound=bound: bound)
        assert take_seat("auto", world) == (torch.device("cuda", 1), cores)
    assert take_seat("auto", world)[1] == 8


def test_a_gpu_by_number_is_refused_for_several():
    with pytest.raises(UserError, match=r"^device=cuda:1 with devices=2"):
        check(composed("device=cuda:1", "devices=2")[0])


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ("devices=9", "devices=9: must be at most batch_size=8"),
        ("microbatches=3", "microbatches=3: .* between 1 and 2"),
    ],
)
def test_each_rank_needs_a_sequence_for_each_microbatch(given: str, refused: str):
    with pytest.raises(UserError, match=refused):
        check(composed("batch_size=8", "devices=4", given)[0])


def test_threads_are_shared():
    before = torch.get_num_threads()
    assert (share_cores(10_000), torch.get_num_threads()) == (10_000, before)
    assert (share_cores(0), torch.get_num_threads()) == (1, 1)


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
    monkeypatch.setattr(devices, "SYSTEM", tmp_path)
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
        other.join(300)
    assert all(cores == {4, 5, 6, 7} for cores in bound.values())


def test_no_rank_leaves_the_cores_that_the_process_was_given(system: Path, bound: dict[int, set[int]]):
    assert bind_to_node([0, 1], 0) == 3
    assert all(cores == {1, 2, 3} for cores in bound.values())


@pytest.mark.parametrize("nodes", [[1], [None, 1], [7, 1]])
def test_where_there_is_nothing_to_choose_nothing_is_bound(system: Path, bound: dict, nodes: list[int | None]):
    assert bind_to_node(nodes, 0) is None
    assert not bound


def test_on_one_node_or_without_a_core_of_it_nothing_is_bound(system: Path, bound: dict, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda process: {4, 5})
        assert bind_to_node([0, 1], 0) is None
    (system / "devices/system/node/node1/cpulist").unlink()
    assert bind_to_node([0, 0], 0) is None
    assert not bound
