"""The ring of host blocks: what it reads, in which order, how it waits, and how it ends."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload.files import file_ring
from offload.files.file_ring import FileRing, ReadPlan
from offload.files.mapped_files import DIRECT_BYTES, FileSpan, MappedFile
from offload.memory.host_memory import HostArena
from offload.streams.stream_checker import CheckedStreams, StreamOrderError
from tests.offload.helpers.mapped import reads_through

CPU = torch.device("cpu")
UNIT = 3 * DIRECT_BYTES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(torch.randint(0, 256, (10 * UNIT + 5,), generator=torch.Generator().manual_seed(0)).byte().numpy())
    return file


@pytest.fixture
def plans(path: Path) -> list[ReadPlan]:
    return [ReadPlan(f"unit {n}", [FileSpan(path, 5 + n * UNIT, UNIT)]) for n in range(10)]


@pytest.fixture
def streams() -> CheckedStreams:
    return CheckedStreams(CPU)


@pytest.fixture
def ring(path: Path, streams: CheckedStreams) -> Iterator[FileRing]:
    made = ring_of(path, streams)
    yield made
    made.close()


def ring_of(path: Path, streams: CheckedStreams, count: int = 2, **options) -> FileRing:
    ring = FileRing(
        {path: MappedFile(path)}, HostArena(CPU), streams, block_bytes=4 * DIRECT_BYTES, count=count, **options
    )
    # A read that brings too little shows.
    for block in ring._blocks:
        block.memory.bytes.fill_(0xFF)
    return ring


def bytes_of(ring: FileRing, plan: ReadPlan, nbytes: int = UNIT) -> bytes:
    """Takes a plan as a copy does, and returns its bytes."""
    fill = ring.take(plan)
    ring.declare_reads(fill, "copy")
    place = plan.places[0]
    taken = bytes(fill.memory.bytes[place : place + nbytes].tolist())
    ring.give_back(fill)
    return taken


def test_spans_that_touch_are_one_read_of_whole_disk_blocks(path: Path, tmp_path: Path):
    other = tmp_path / "other"
    plan = ReadPlan("unit", [FileSpan(other, 0, 10), FileSpan(path, 5000, 5000), FileSpan(path, 100, 4900)])
    reads = [(read.path, read.offset, read.position, read.nbytes, read.needed) for part in plan.parts for read in part]
    assert reads == [(other, 0, 0, 4096, 10), (path, 0, 4096, 12288, 10000)]
    assert plan.places == [0, 4096 + 5000, 4096 + 100]
    assert plan.nbytes == 4096 + 12288


def test_reads_are_cut_into_parts(path: Path, streams: CheckedStreams, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(file_ring, "PART_BYTES", DIRECT_BYTES)
    plan = ReadPlan("unit", [FileSpan(path, 5, UNIT)])
    assert [sum(read.nbytes for read in part) for part in plan.parts] == [DIRECT_BYTES] * 4
    assert plan.parts[-1][0].needed == 5
    ring = ring_of(path, streams)
    assert bytes_of(ring, plan) == path.read_bytes()[5 : 5 + UNIT]
    ring.close()


@pytest.mark.parametrize("direct", [False, True])
def test_every_plan_gets_its_bytes_in_any_order(path: Path, plans: list[ReadPlan], streams, direct: bool):
    content = path.read_bytes()
    ring = ring_of(path, streams, direct=direct)
    for number in (0, 1, 2, 9, 4, 4, 3, 0):
        ring.expect([plans[number], plans[(number + 1) % 10]])
        assert bytes_of(ring, plans[number]) == content[5 + number * UNIT : 5 + (number + 1) * UNIT]
    ring.close()


def test_expected_plans_are_read_ahead_and_no_others(ring: FileRing, plans: list[ReadPlan]):
    assert not ring.is_ready(plans[0])
    ring.expect(plans)
    wait_for(lambda: ring.is_ready(plans[0]) and ring.is_ready(plans[1]))
    assert not ring.is_ready(plans[2])
    read = ring.read_bytes
    bytes_of(ring, plans[0])
    ring.expect(plans[1:])
    wait_for(lambda: ring.is_ready(plans[2]))
    assert ring.read_bytes == read * 3 // 2


def test_what_is_not_expected_any_more_makes_way(ring: FileRing, plans: list[ReadPlan]):
    ring.expect(plans[:2])
    wait_for(lambda: ring.is_ready(plans[0]) and ring.is_ready(plans[1]))
    ring.expect([plans[1], plans[5]])
    wait_for(lambda: ring.is_ready(plans[5]))
    assert ring.is_ready(plans[1])
    assert not ring.is_ready(plans[0])


def test_a_plan_that_nobody_expected_takes_the_place_of_the_last(ring: FileRing, plans: list[ReadPlan]):
    ring.expect(plans[:2])
    wait_for(lambda: ring.is_ready(plans[0]) and ring.is_ready(plans[1]))
    bytes_of(ring, plans[7])
    assert ring.is_ready(plans[0])
    assert not ring.is_ready(plans[1])


def test_short_and_slow_reads_bring_all_bytes(ring: FileRing, plans: list[ReadPlan], path: Path):
    def read(system, fd, buffers, offset):
        time.sleep(0.001)
        return system(fd, [buffers[0][:1000]], offset)

    with reads_through(read):
        assert bytes_of(ring, plans[3]) == path.read_bytes()[5 + 3 * UNIT : 5 + 4 * UNIT]
    assert ring.wait_ms > 0


def test_a_file_that_ends_early_and_is_not_changed_is_an_error(ring: FileRing, plans: list[ReadPlan]):
    with reads_through(lambda system, fd, buffers, offset: 0), pytest.raises(OSError, match="before its weights do"):
        bytes_of(ring, plans[2])


def test_a_copy_that_does_not_wait_for_the_read_is_found(ring: FileRing, plans: list[ReadPlan], monkeypatch):
    # The read has happened, and the copy knows nothing of it.
    monkeypatch.setattr(ring, "_wait_for", lambda fill: wait_for(lambda: ring.read_bytes))
    with pytest.raises(StreamOrderError, match="part 0 of ring block 0"):
        bytes_of(ring, plans[0])


def wait_for(condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
