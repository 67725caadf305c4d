"""Room for sums: the same bytes on all sharers, and none that is still in use."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from offload.sharing.links import Links
from offload.sharing.sharers import NO_SHARERS
from offload.sharing.sum_ring import SumRing, in_steps, ring_bytes
from offload.streams.deferred_free import PendingFree
from offload.streams.stream_checker import CheckedStreams, StreamOrderError

CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16


def ring_of(nbytes: int) -> tuple[SumRing, CheckedStreams]:
    streams = CheckedStreams(CPU)
    return SumRing(Links(NO_SHARERS, CPU), streams, nbytes), streams


def use(streams: CheckedStreams, buffer: PendingFree) -> None:
    """Writes a buffer on the gather stream, and reads it on d2h, as a sum that goes home."""
    streams.writes(streams.gather, buffer, "sum")
    summed = streams.event()
    summed.record(streams.gather)
    streams.d2h.wait_event(summed)
    streams.reads(streams.d2h, buffer, "copy out")
    buffer.done.record(streams.d2h)


def start(buffer: PendingFree) -> int:
    return buffer.tensor.storage_offset() * buffer.tensor.element_size()


def test_buffers_are_aligned_and_have_their_dtype_and_size():
    ring, streams = ring_of(8192)
    first, second = ring.take([(F32, 300), (BF16, 500)], "a sum")
    assert (first.tensor.dtype, first.tensor.numel(), start(first)) == (F32, 300, 0)
    assert (second.tensor.dtype, second.tensor.numel(), start(second)) == (BF16, 500, 2048)
    assert streams.gather is first.owner
    assert str(first) == "a sum"


def test_two_sums_have_room_and_the_third_takes_the_place_of_the_first():
    ring, streams = ring_of(8192)
    found = []
    for number in range(4):
        (buffer,) = ring.take([(F32, 1024)], f"sum {number}")
        use(streams, buffer)
        found.append(start(buffer))
    assert found == [0, 4096, 0, 4096]


@pytest.mark.parametrize("seed", range(10))
def test_no_byte_is_taken_that_is_still_in_use(seed: int):
    generator, (ring, streams) = random.Random(seed), ring_of(16384)
    for number in range(100):
        sizes = [(generator.choice([F32, BF16]), generator.randint(1, 1000)) for _ in range(generator.randint(1, 2))]
        for buffer in ring.take(sizes, f"sum {number}"):
            # The checker knows each buffer by itself; the bytes show whether two have the same.
            buffer.tensor.fill_(number % 100)
            use(streams, buffer)
        kept = {(first, last): buffer for first, last, buffer in ring._taken}
        spans = sorted(kept)
        assert all(one[1] <= two[0] for one, two in pairwise(spans))


def test_a_buffer_that_is_not_home_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    ring, streams = ring_of(2048)
    for number in range(2):
        (buffer,) = ring.take([(F32, 256)], f"sum {number}")
        use(streams, buffer)
    monkeypatch.setattr(type(streams.gather), "wait_event", lambda stream, event: None)
    with pytest.raises(StreamOrderError, match="sum 0"):
        ring.take([(F32, 256)], "sum 2")


def test_what_has_room_is_told():
    ring, _ = ring_of(2048)
    assert ring.has_room(2048)
    assert not ring.has_room(2049)
    empty, _ = ring_of(0)
    assert not empty.has_room(1)


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 1024), (1024, 1024), (1025, 2048)])
def test_steps(nbytes: int, expected: int):
    assert in_steps(nbytes) == expected


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        ([], 0),
        ([0, 0], 0),
        ([1000], 2048),
        ([4096] * 4, 8192),
        # Blocks, and an embedding and a head much larger.
        ([4096] * 32 + [12_288] * 2, 12_288),
        ([4096] * 32 + [6144] * 2, 8192),
        # Small and large layers of each block.
        ([1024] * 4 + [3072] * 3, 6144),
    ],
)
def test_room_for_two_of_the_usual_size_and_for_the_largest(sums: list[int], expected: int):
    assert ring_bytes(sums) == expected
