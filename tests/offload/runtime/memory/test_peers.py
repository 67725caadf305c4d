"""Sharers read each other's device memory, and wait for each other; one that is lost keeps no stream waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from offload.runtime import cuda_driver
from offload.runtime.cuda_driver import DriverError
from offload.runtime.memory import peers
from offload.runtime.memory.peers import CudaPeers, HostPeers, Part, Peers, has_come
from offload.runtime.sharing.processes import Processes
from offload.runtime.sharing.sharers import SharerLostError
from tests.offload.helpers.cuda_driver import FakeDriver
from tests.offload.helpers.sharers import ThreadSharers, as_sharers

ON_CPU = SimpleNamespace(device=torch.device("cpu", 0))


def nobody_objects(problem: str | None) -> None:
    assert problem is None


def of_gpus(sharers: ThreadSharers) -> CudaPeers:
    return CudaPeers(sharers, ON_CPU, nobody_objects)


@pytest.fixture(params=["cpu", "gpu"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[ThreadSharers], Peers]:
    if request.param == "cpu":
        return HostPeers
    FakeDriver().install(monkeypatch)
    return of_gpus


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    driver.install(monkeypatch)
    return driver


@pytest.mark.parametrize("count", [2, 3])
def test_each_reads_what_the_others_had_when_they_met(make: Callable[[ThreadSharers], Peers], count: int):
    def work(sharers: ThreadSharers) -> list[list[int]]:
        found, own = [], make(sharers)
        regions = [own.allocate(nbytes) for nbytes in (64, 0, 10_000)]
        assert [region.numel() for region in regions] == [64, 0, 10_000]
        for turn in range(20):
            regions[2].fill_(10 * turn + sharers.rank)
            if turn % count == sharers.rank:
                time.sleep(0.005)
            own.meet()
            target = torch.empty(2 * count, dtype=torch.float64)
            own.read([Part(target[2 * rank : 2 * rank + 2], rank, 2, 8) for rank in range(count)])
            own.meet()
            found.append(target.view(torch.uint8).view(count, -1).amax(1).tolist())
        own.close()
        return found

    for found in as_sharers(count, work):
        assert found == [[(10 * turn + rank) % 256 for rank in range(count)] for turn in range(20)]


def test_a_number_goes_round():
    assert has_come(5, 5)
    assert has_come(6, 5)
    assert not has_come(4, 5)
    assert has_come(3, 2**32 - 3)
    assert not has_come(2**32 - 3, 3)


def test_meetings_go_on_where_the_number_goes_round(make: Callable[[ThreadSharers], Peers]):
    def work(sharers: ThreadSharers) -> int:
        own = make(sharers)
        own._number = 2**32 - 2
        for place in range(own._numbers.nbytes // 64):
            own._numbers[64 * place] = own._number
        sharers.laid_down(None)
        for _ in range(4):
            own.meet()
        own.close()
        return own._numbers[own._numbers.theirs(1 - sharers.rank)]

    assert as_sharers(2, work) == [2, 2]


class WithItself:
    """Two sharers, both of which are this one."""

    rank, count, first, limit_s = 0, 2, 0, 60.0

    def exchange(self, numbers, what: str, patient: bool = False, everywhere: bool = False) -> list[list[int]]:
        return [list(numbers)] * 2


def test_small_regions_of_one_allocation_are_opened_once(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    opened = []
    monkeypatch.setattr(cuda_driver, "opened", lambda handle: opened.append(handle) or driver.opened(handle))
    own = CudaPeers(WithItself(), ON_CPU, nobody_objects)
    flat = torch.zeros(2 * 4096, dtype=torch.uint8)
    # From the start of a page on, which `driver` takes for that of an allocation.
    flat = flat[-flat.data_ptr() % 4096 :][:1536]
    for part in flat.chunk(3):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *size, part=part, **options: part)
            own.allocate(512)
    flat.copy_(torch.arange(3, dtype=torch.uint8).repeat_interleave(512))
    found = [torch.zeros(4, dtype=torch.uint8) for _ in range(3)]
    own.read([Part(target, 1, number, 100) for number, target in enumerate(found)])
    assert [target.unique().tolist() for target in found] == [[0], [1], [2]]
    own.close()
    assert (len(opened), driver.closed) == (1, [flat.data_ptr()])


def test_a_problem_of_one_is_told_to_all(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    unlocked = []
    monkeypatch.setattr(peers, "unlock_pages", lambda address, device, wait: unlocked.append(address))

    def objects(problem: str | None) -> None:
        assert problem is None
        raise DriverError("rank 1: cannot be locked")

    def work(sharers: ThreadSharers) -> None:
        with pytest.raises(DriverError, match="rank 1"):
            CudaPeers(sharers, ON_CPU, objects)

    as_sharers(2, work)
    assert len(unlocked) == 2


@pytest.mark.parametrize("lost", ["ended", "late"])
def test_a_sharer_that_is_lost_lets_the_stream_of_the_other_go(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, lost: str
):
    monkeypatch.setattr(peers, "LOOK_EVERY_S", 0.005)
    gone = threading.Event()
    if lost == "ended":
        monkeypatch.setattr(Processes, "has_ended", lambda self, rank: rank == 1 and gone.is_set())

    def work(sharers: ThreadSharers) -> None:
        sharers.limit_s = 0.2 if lost == "late" else 300
        own = of_gpus(sharers)
        own.meet()
        if sharers.rank == 0:
            gone.set()
            own.meet()
            with pytest.raises(RuntimeError, match="a step has failed in one of the processes"):
                own.meet()
        sharers.laid_down(None)
        own.close()

    as_sharers(2, work)


def test_a_sharer_that_is_slow_and_goes_on_is_not_lost(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "LOOK_EVERY_S", 0.005)

    def work(sharers: ThreadSharers) -> None:
        sharers.limit_s = 0.5
        own = of_gpus(sharers)
        for _ in range(8):
            # In all longer than the limit.
            time.sleep(0.1 * sharers.rank)
            own.meet()
        sharers.laid_down(None)
        own.close()

    as_sharers(2, work)


def test_on_the_cpu_a_sharer_that_does_not_come_is_named():
    def work(sharers: ThreadSharers) -> None:
        sharers.limit_s = 0.2
        own = HostPeers(sharers)
        if sharers.rank == 0:
            with pytest.raises(SharerLostError, match=r"^rank 1 did not come within 0\.2 seconds$"):
                own.meet()
        sharers.laid_down(None)

    as_sharers(2, work)


def test_the_thread_that_watches_ends_with_what_it_watches(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "LOOK_EVERY_S", 0.005)
    before = threading.active_count()

    def work(sharers: ThreadSharers) -> None:
        # Dropped without `close`.
        of_gpus(sharers)
        sharers.laid_down(None)

    as_sharers(2, work)
    deadline = time.monotonic() + 60
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_tensors_are_copied_as_torch_copies_them(driver: FakeDriver):
    own = CudaPeers(WithItself(), ON_CPU, nobody_objects)
    plain, other_type, turned = torch.randn(3, 4), torch.randn(5).bfloat16(), torch.randn(4, 2).t()
    sources = [plain, other_type, turned, torch.empty(0)]
    targets = [torch.zeros(3, 4), torch.zeros(5), torch.zeros(2, 4), torch.empty(0)]
    versions = [target._version for target in targets]
    own.copy_each(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(target.dtype))
    assert all(target._version > before for target, before in zip(targets[:3], versions, strict=False))
    assert driver.copies == 2
    own.close()
