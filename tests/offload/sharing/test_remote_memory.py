"""Sharers reach each other's device memory on CPUs, and on GPUs with a driver of threads; who is lost stops nobody."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from offload.sharing import cuda_driver, remote_memory
from offload.sharing.cuda_driver import DriverError
from offload.sharing.remote_memory import CudaPeers, Part, Peers, fixed_segments, has_come
from offload.sharing.sharers import Processes, SharerLostError
from offload.torch_private import torch_internals
from tests import ROOT
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
        return Peers
    FakeDriver().install(monkeypatch)
    return of_gpus


@pytest.mark.parametrize("count", [2, 3])
def test_between_meetings_each_reads_what_others_had_and_has_what_they_wrote(
    make: Callable[[ThreadSharers], Peers], count: int
):
    def work(sharers: ThreadSharers) -> list[tuple[list[int], list[int]]]:
        found, own = [], make(sharers)
        regions = [own.allocate(nbytes) for nbytes in (64, 0, 10_000, 16 * count + 8)]
        assert [region.numel() for region in regions] == [64, 0, 10_000, 16 * count + 8]
        read, written = regions[2:]
        for turn in range(20):
            number = 10 * turn + sharers.rank
            read.fill_(number)
            written.fill_(255)
            if turn % count == sharers.rank:
                time.sleep(0.005)
            own.meet()
            target, values = torch.empty(2 * count, dtype=torch.float64), torch.empty(2, dtype=torch.float64)
            own.read([Part(target[2 * rank : 2 * rank + 2], rank, 2, 8) for rank in range(count)])
            values.view(torch.uint8).fill_(number)
            own.write([Part(values, rank, 3, 8 + 16 * sharers.rank) for rank in range(count)])
            own.meet()
            assert written[:8].eq(255).all()
            seen = target.view(torch.uint8).view(count, -1), written[8:].view(count, -1)
            found.append(tuple(each.unique(dim=1).flatten().tolist() for each in seen))
        own.close()
        return found

    for found in as_sharers(count, work):
        for turn, seen in enumerate(found):
            assert seen == ([(10 * turn + rank) % 256 for rank in range(count)],) * 2


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


def test_on_the_cpu_a_sharer_that_does_not_come_is_named():
    def work(sharers: ThreadSharers) -> None:
        sharers.limit_s = 0.2
        own = Peers(sharers)
        if sharers.rank == 0:
            with pytest.raises(SharerLostError, match=r"^rank 1 did not come within 0\.2 seconds$"):
                own.meet()
        sharers.laid_down(None)

    as_sharers(2, work)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    driver.install(monkeypatch)
    return driver


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
    monkeypatch.setattr(remote_memory, "unlock_pages", lambda address, device, wait: unlocked.append(address))

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
    monkeypatch.setattr(remote_memory, "LOOK_EVERY_S", 0.005)
    gone = threading.Event()
    if lost == "ended":
        ended = SharerLostError(1, "the process 7 of rank 1 has ended", hangs=False)
        monkeypatch.setattr(
            Processes, "lost", lambda self, rank, waited_s, limit_s: ended if rank == 1 and gone.is_set() else None
        )

    def work(sharers: ThreadSharers) -> None:
        sharers.limit_s = 0.2 if lost == "late" else 300
        own = of_gpus(sharers)
        own.meet()
        if sharers.rank == 0:
            gone.set()
            own.meet()
            with pytest.raises(SharerLostError, match=r"rank 1 (has ended|did not come within 0\.2 seconds)$") as error:
                own.meet()
            assert (error.value.rank, error.value.hangs) == (1, lost == "late")
        sharers.laid_down(None)
        own.close()

    as_sharers(2, work)


def test_a_sharer_that_is_slow_and_goes_on_is_not_lost(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_memory, "LOOK_EVERY_S", 0.005)

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


def test_the_thread_that_watches_ends_with_what_it_watches(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_memory, "LOOK_EVERY_S", 0.005)
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
    conjugate, negative = (
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
    )
    sources = [plain, other_type, turned, conjugate, negative, torch.empty(0)]
    targets = [torch.zeros(3, 4), torch.zeros(5), torch.zeros(2, 4), torch.zeros(3).to(conjugate), torch.zeros(3)]
    targets.append(torch.empty(0))
    versions = [target._version for target in targets]
    own.copy_each(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(target.dtype))
    assert all(target._version > before for target, before in zip(targets[:5], versions, strict=False))
    assert driver.copies == 2
    own.close()


def test_after_an_error_of_its_own_nothing_more_is_asked(driver: FakeDriver):
    own = CudaPeers(WithItself(), ON_CPU, nobody_objects)
    own.let_go()
    with pytest.raises(RuntimeError, match=r"^a step has failed"):
        own.meet()
    own.close()


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("settings", ["", "max_split_size_mb:512", "max_split_size_mb:512,expandable_segments:True"])
def test_segments_are_fixed_where_they_grow(monkeypatch: pytest.MonkeyPatch, name: str, settings: str):
    made = []
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, settings)
    monkeypatch.setattr(torch_internals, "set_allocator", made.append)
    grow = "expandable" in settings

    def fail() -> None:
        assert made == ["expandable_segments:False"] * grow
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"), fixed_segments():
        fail()
    assert made == ["expandable_segments:False", settings] * grow


FIXED = """
import torch
from offload.sharing.remote_memory import fixed_segments
torch.ones(2**25, device="cuda")
with fixed_segments(), torch.cuda.use_mem_pool(pool := torch.cuda.MemPool()):
    inside = torch.ones(2**24, device="cuda")
after = torch.ones(2**26, device="cuda")
def grows(tensor):
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]:
            return segment["is_expandable"]
print(grows(inside), grows(after))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_that_memory_alone_is_in_fixed_segments():
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-W", "error", "-c", FIXED]
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (shown.stdout, shown.returncode) == ("False True\n", 0), shown.stderr
