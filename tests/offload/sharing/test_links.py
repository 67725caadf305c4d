"""Slices that devices exchange: by copies as by collectives, whoever is late, and collectives where copies fail."""

import logging
import random
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from offload.sharing import cuda_driver
from offload.sharing import links as links_module
from offload.sharing.links import Addends, CopyLinks, Links, links_of
from offload.sharing.remote_memory import CudaPeers, Peers
from offload.streams.stream_checker import CheckedStreams
from tests.offload.helpers.cuda_driver import FakeDriver
from tests.offload.helpers.sharers import ThreadSharers, as_sharers

CPU = torch.device("cpu")
BY_COLLECTIVES = "devices exchange slices by collectives, which is slower than by copies"


def by_copies(sharers: ThreadSharers) -> Links:
    return CopyLinks(sharers, CPU, Peers(sharers))


def late(sharers: ThreadSharers, turn: int) -> None:
    """Lets one sharer in turn come later than the others."""
    if random.Random(turn).randrange(sharers.count) == sharers.rank:
        time.sleep(0.003)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_gets_the_slices_of_all_wherever_they_lie(count: int):
    def work(sharers: ThreadSharers) -> list[list[float]]:
        links, found = by_copies(sharers), []
        slots = [links.allocate(4096 * count) for _ in range(3)]
        for turn in range(12):
            # Sharers use other slots, and each overwrites its own as soon as it may.
            slot = slots[(turn + sharers.rank) % 3]
            whole = slot[512 * count : 1536 * count]
            whole.fill_(255)
            whole.chunk(count)[sharers.rank].fill_(10 * turn + sharers.rank)
            places = [place for (place,) in sharers.exchange((links.place_of(slot),), "places")]
            assert places == [(turn + rank) % 3 for rank in range(count)]
            late(sharers, turn)
            links.gather(whole, places, "a test")
            found.append(whole.view(count, -1).unique(dim=1).flatten().tolist())
            late(sharers, turn + 1)
            slot.fill_(254)
        links.close()
        return found

    for found in as_sharers(count, work):
        assert found == [[10 * turn + rank for rank in range(count)] for turn in range(12)]


# Shapes, and the orders of their dimensions in the memory of a sum; the gradients of one sharer are in another order.
SHAPES = [((7,), (0,)), ((0, 3), (0, 1)), ((5, 9), (0, 1)), ((1, 6, 1), (0, 1, 2)), ((2, 3, 4), (0, 2, 1)), ((), ())]
STEP = 8


def addends_in(memory: torch.Tensor, start: int, dtype: torch.dtype, rank: int, turn: int, count: int) -> Addends:
    """A sharer's tensors, and their places in `memory`, which lie apart. Nothing of them is in the memory."""
    views, tensors, end = [], [], 0
    for number, (shape, order) in enumerate(SHAPES):
        values = given((*shape, number), dtype, rank, turn)
        dense = torch.empty([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(order))])
        view = memory.view(dtype).as_strided(shape, dense.stride(), start // dtype.itemsize + end)
        views.append(view)
        if dtype.is_complex and turn % 3 == 1:
            # As autograd may leave it: the conjugate of what is in memory.
            values = values.conj().resolve_conj().conj()
        same_order = (rank + turn) % 2
        tensors.append(torch.empty_strided(shape, view.stride(), dtype=dtype).copy_(values) if same_order else values)
        end += -(-values.numel() // STEP) * STEP
    length = -(-end // (STEP * count)) * STEP * count
    flat = memory[start : start + length * dtype.itemsize].view(dtype)
    return Addends(flat, views, tensors)


def given(shape: tuple[int, ...], dtype: torch.dtype, rank: int, turn: int) -> torch.Tensor:
    *sizes, number = shape
    generator = torch.Generator().manual_seed(1000 * turn + 10 * number + rank)
    exponents = torch.randint(-3, 3, sizes, generator=generator)
    return (torch.randn(sizes, generator=generator) * 10.0**exponents).to(dtype)


def expected_sums(dtype: torch.dtype, count: int, turn: int) -> list[torch.Tensor]:
    """The sums of the tensors of all, in the order of ranks."""
    totals = []
    for number, (shape, _) in enumerate(SHAPES):
        total = given((*shape, number), dtype, 0, turn)
        for other in range(1, count):
            total = total + given((*shape, number), dtype, other, turn)
        totals.append(total)
    return totals


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("way", ["all", "in slices", "in place"])
def test_sums_are_in_the_order_of_ranks(count: int, dtype: torch.dtype, way: str):
    def work(sharers: ThreadSharers) -> list[list[torch.Tensor]]:
        links, found = by_copies(sharers), []
        links.allocate(64)
        memory = links.allocate(8192)
        for turn in range(8):
            memory.fill_(255)
            addends = addends_in(memory, 1024, dtype, sharers.rank, turn, count)
            versions = [tensor._version for tensor in addends.tensors]
            late(sharers, turn)
            if way == "in place":
                links.sum_in_place(addends, "a test")
                # Who keeps one sees that it has changed.
                assert all(t._version > v for t, v in zip(addends.tensors, versions, strict=True) if t.numel())
                found.append([tensor.clone() for tensor in addends.tensors])
            else:
                links.sum(addends, "a test", in_slices=way == "in slices")
                size = addends.flat.numel() // count
                if way == "in slices":
                    for rank, others in enumerate(addends.flat.chunk(count)):
                        if rank != sharers.rank:
                            others.view(torch.uint8).fill_(254)
                found.append([view.clone() for view in addends.views])
                assert size % STEP == 0
            late(sharers, turn + 1)
        assert sharers.sums == 0
        links.close()
        return found

    everyone = as_sharers(count, work)
    for turn in range(8):
        for number, expected in enumerate(expected_sums(dtype, count, turn)):
            found = [of_one[turn][number] for of_one in everyone]
            if way != "in slices":
                assert all(same_bits(total, expected) for total in found)
                continue
            # Each element is in the slice of one sharer; the others have lost it.
            right = torch.stack([total == expected for total in found])
            assert right.sum(0).eq(1).all()


def test_a_sharer_may_take_sums_in_place_and_another_not():
    """Sharers may differ in what else holds the memory of a gradient."""

    def work(sharers: ThreadSharers) -> list[torch.Tensor]:
        links = by_copies(sharers)
        memory, found = links.allocate(8192), []
        for turn in range(6):
            memory.fill_(255)
            addends = addends_in(memory, 0, torch.float32, sharers.rank, turn, 2)
            in_place = (turn + sharers.rank) % 2
            late(sharers, turn)
            (links.sum_in_place if in_place else links.sum)(addends, "a test")
            found.append([tensor.clone() for tensor in (addends.tensors if in_place else addends.views)])
        links.close()
        return found

    for found in as_sharers(2, work):
        for turn, sums in enumerate(found):
            expected = expected_sums(torch.float32, 2, turn)
            assert all(same_bits(total, right) for total, right in zip(sums, expected, strict=True))


def small_sum(memory: torch.Tensor, sharers: ThreadSharers) -> Addends:
    flat = memory.view(torch.float32)
    return Addends(flat, [flat], [torch.tensor([1.0 + sharers.number, 2.0])])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("hosts", [1, 2])
def test_sums_of_other_memory_and_over_several_hosts_are_the_sharers_own(hosts: int, in_place: bool):
    def work(sharers: ThreadSharers) -> tuple[list[float], int]:
        links = by_copies(sharers)
        own = links.allocate(8)
        addends = small_sum(own if hosts > 1 else torch.empty(2), sharers)
        (links.sum_in_place if in_place else links.sum)(addends, "a test")
        return (addends.tensors[0] if in_place else addends.flat).tolist(), sharers.sums

    assert as_sharers(2, work, hosts) == [([3.0, 4.0] if hosts == 1 else [10.0, 8.0], 1)] * 2 * hosts


@pytest.mark.parametrize(
    ("count", "device", "expected"), [(2, "cpu", CopyLinks), (2, "meta", Links), (1, "cpu", Links)]
)
def test_who_has_which_links(count: int, device: str, expected: type):
    def work(sharers: ThreadSharers) -> Links:
        links = links_of(sharers, CheckedStreams(torch.device(device)))
        assert links.allocate(8).device.type == device
        return links

    for links in as_sharers(count, work):
        assert type(links) is expected


def test_collectives_are_those_of_the_sharers():
    def work(sharers: ThreadSharers) -> tuple[int, int]:
        links = Links(sharers, CPU)
        memory = links.allocate(16)
        links.gather(memory, [links.place_of(memory)] * 2, "a test")
        links.sum(small_sum(memory[:8], sharers), "a test", in_slices=True)
        addends = small_sum(memory[8:], sharers)
        links.sum_in_place(addends, "a test")
        assert addends.tensors[0].tolist() == [3, 4]
        links.let_go()
        links.close()
        return sharers.gathers, sharers.sums

    assert as_sharers(2, work) == [(1, 2)] * 2


class OnGpu(CheckedStreams):
    """Streams of the CPU that say that they are a GPU's."""

    def __init__(self):
        super().__init__(CPU)
        self.device = SimpleNamespace(type="cuda", index=0)


def links_of_gpus(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> list[Links]:
    """The links that two sharers get of a GPU each, where the driver is `driver`."""
    driver.install(monkeypatch)
    empty = torch.empty
    # The device is none that torch knows.
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **options: empty(*size, **options))

    def work(sharers: ThreadSharers) -> Links:
        links = links_of(sharers, OnGpu())
        memory = links.allocate(64)
        memory.chunk(2)[sharers.rank].fill_(sharers.rank)
        memory.chunk(2)[1 - sharers.rank].fill_(9)
        links.gather(memory, [links.place_of(memory)] * 2, "a test")
        assert memory.chunk(2)[0].eq(0).all()
        assert memory.chunk(2)[1].eq(1).all()
        links.close()
        return links

    return as_sharers(2, work)


def test_gpus_that_reach_each_other_s_memory_copy(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    driver = FakeDriver()
    for links in links_of_gpus(monkeypatch, driver):
        assert type(links) is CopyLinks
        assert type(links._peers) is CudaPeers
    # Of each: a slice gathered here, and one in the trial. There two pieces are sent to the other, and of the sums two
    # pieces are read and two are its own.
    assert driver.copies == 2 * (1 + 1 + 2 + 2 + 2)
    assert not caplog.records


class OneHasNoHandles(FakeDriver):
    """Only the memory that is asked for first has none, of the one sharer or of the other."""

    def __init__(self):
        super().__init__()
        self.fails = iter([True])

    def exported(self, address: int) -> tuple[bytes, int]:
        if next(self.fails, False):
            raise cuda_driver.DriverError(FAILING_CALLS["exported"])
        return super().exported(address)


class OneCopyAtATime(FakeDriver):
    problem = "cuMemcpyBatchAsync failed: invalid argument (1)"

    def queue_copies(self, stream: int, copies: Sequence[tuple[int, int, int]]) -> None:
        if len(copies) > 1:
            raise cuda_driver.DriverError(self.problem)
        super().queue_copies(stream, copies)


class OneOfSeveral(FakeDriver):
    """Of several copies the last is left out."""

    problem = "copies between two devices brought other bytes"

    def queue_copies(self, stream: int, copies: Sequence[tuple[int, int, int]]) -> None:
        super().queue_copies(stream, copies[: max(1, len(copies) - 1)])


class OtherBytes(FakeDriver):
    problem = "copies between two devices brought other bytes"

    def queue_copies(self, stream: int, copies: Sequence[tuple[int, int, int]]) -> None:
        super().queue_copies(stream, [(target, source, nbytes - 1) for target, source, nbytes in copies])


FAILING_CALLS = {
    "check_complete": "the CUDA driver has no cuMemcpyBatchAsync: it is older than CUDA 12.8",
    "exported": "cuIpcGetMemHandle failed: invalid argument (1)",
    "opened": "cuIpcOpenMemHandle_v2 failed: peer access is not supported between these two devices (217)",
}


def failing(name: str) -> FakeDriver:
    """A driver of which one call fails."""
    driver = FakeDriver()
    driver.problem = FAILING_CALLS[name]

    def fail(*arguments: object) -> None:
        raise cuda_driver.DriverError(driver.problem)

    setattr(driver, name, fail)
    return driver


@pytest.mark.parametrize(
    "driver", [*map(failing, FAILING_CALLS), OneCopyAtATime(), OneOfSeveral(), OtherBytes()], ids=lambda it: it.problem
)
def test_gpus_that_do_not_exchange_by_collectives(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, driver: FakeDriver
):
    with caplog.at_level(logging.WARNING):
        for links in links_of_gpus(monkeypatch, driver):
            assert type(links) is Links
    (line,) = (record.message for record in caplog.records)
    assert line == f"{BY_COLLECTIVES}: rank 0: {driver.problem}"


def test_a_problem_of_one_gpu_is_that_of_all(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        for links in links_of_gpus(monkeypatch, OneHasNoHandles()):
            assert type(links) is Links
    (line,) = (record.message for record in caplog.records)
    problems = FAILING_CALLS["exported"], "rank 1 cannot let others reach its memory"
    assert line in [f"{BY_COLLECTIVES}: rank 0: {problem}" for problem in problems]


def test_a_copy_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(links_module, "TRIAL_LIMIT_S", 0.05)
    monkeypatch.setattr("offload.streams.stream_checker.CheckedEvent.query", lambda event: False)
    for links in links_of_gpus(monkeypatch, FakeDriver()):
        assert type(links) is Links
    assert "took longer than 0.05 s" in caplog.text
