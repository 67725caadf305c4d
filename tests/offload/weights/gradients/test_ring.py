"""The ring in which gradients wait: blocks that are lent never overlap, and come back when they have been read."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload.memory.host_memory import HostArena, aligned
from offload.modes.layer_stream import LayerStream
from offload.streams.stream_checker import CheckedStreams, StreamOrderError
from offload.weights.gradients import ring
from offload.weights.gradients.ring import GradientRing, gradient_ring_bytes
from offload.weights.units.partition import cut
from offload.weights.units.unit import UnitTensor
from tests.offload.helpers.models import Stack
from tests.offload.helpers.units import tensor_of


def ring_of(nbytes: int, streams: CheckedStreams) -> GradientRing:
    return GradientRing(HostArena(streams.device).allocate(nbytes, "ring"), streams)


def sized(nbytes: int) -> UnitTensor:
    return tensor_of(nn.Parameter(torch.empty(nbytes // 4)), f"{nbytes} bytes")


def consumed(streams: CheckedStreams):
    signal = streams.signal()
    signal.set()
    return signal


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 12).map(lambda size: 100 * size), max_size=40), st.data())
def test_blocks_that_are_lent_never_overlap(sizes: list[int], data: st.DataObject):
    streams = CheckedStreams(torch.device("cpu"))
    ring, lent = ring_of(5 * 256, streams), []
    for number, nbytes in enumerate(sizes):
        read = data.draw(st.sets(st.sampled_from(lent))) if lent else set()
        for other in read if ring._room(aligned(nbytes)) is not None else lent:
            other.consumed.set()
        block = ring.block(sized(nbytes))
        lent = [other for other in lent if other in ring._lent]
        assert block.end - block.start >= nbytes
        assert 0 <= block.start <= block.end <= 5 * 256
        assert not any(block.start < other.end and other.start < block.end for other in lent)
        block.tensor.fill_(number)
        if data.draw(st.booleans()):
            ring.lend(block, streams.signal())
            lent.append(block)
    for block in lent:
        assert len(set(block.tensor.tolist())) <= 1


def test_a_block_has_shape_strides_and_dtype_of_its_parameter(streams: CheckedStreams):
    weight = nn.Parameter(torch.randn(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last))
    found = ring_of(4096, streams).block(tensor_of(weight)).tensor
    assert (found.shape, found.stride(), found.dtype) == (weight.shape, weight.stride(), weight.dtype)


def test_the_host_goes_on_when_there_is_room_whatever_is_still_read(streams: CheckedStreams):
    ring, signals = ring_of(512, streams), [streams.signal() for _ in range(2)]
    blocks = [ring.block(sized(256))]
    ring.lend(blocks[0], signals[0])
    blocks.append(ring.block(sized(256)))
    ring.lend(blocks[1], signals[1])

    def read() -> None:
        signals[1].set()
        blocks[1].ended.set()

    thread = threading.Timer(0.05, read)
    thread.start()
    assert ring.block(sized(256)).start == blocks[1].start
    assert not signals[0].is_set()
    assert ring.wait_ms > 0
    thread.join(300)


def test_memory_that_an_update_may_still_read_is_not_written(streams: CheckedStreams, monkeypatch):
    """The stream checker notices a wait that is missing."""
    ring, signal = ring_of(256, streams), streams.signal()
    block = ring.block(sized(256))
    streams.writes(streams.d2h, block, "copy out")
    copied = streams.event()
    copied.record(streams.d2h)
    with streams.beside("worker"):
        copied.synchronize()
        streams.reads(None, block, "update")
        signal.set()
    ring.lend(block, signal)
    with monkeypatch.context() as patch:
        patch.setattr(signal, "follow", lambda: None)
        with pytest.raises(StreamOrderError, match="'the next gradient' on d2h may run before 'update' on worker"):
            ring.block(sized(256))
    ring.lend(block, signal)
    ring.block(sized(256))


def test_the_ring_is_smaller_than_all_gradients_and_holds_every_one(monkeypatch: pytest.MonkeyPatch):
    model = Stack(depth=8)
    units = cut(model, list(LayerStream().cut_points(model))).units
    block = units[0].gradient_bytes
    assert gradient_ring_bytes(units) == 8 * block
    monkeypatch.setattr(ring, "LEAST_RING_BYTES", 5 * block)
    assert gradient_ring_bytes(units) == 5 * block
    monkeypatch.setattr(ring, "LEAST_RING_BYTES", 0)
    assert gradient_ring_bytes(units) == 4 * block
    assert gradient_ring_bytes(units[:2]) == 2 * block
    assert gradient_ring_bytes([]) == 0
