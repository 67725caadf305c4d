"""The buffers in which gradients are summed, the parts that each sharer sends home, and room that is not in use."""

import random
from itertools import pairwise

import pytest
import torch
from torch import nn

from offload.memory.host_memory import HostArena
from offload.sharing.links import Links
from offload.sharing.sharers import NO_SHARERS
from offload.sharing.slices import SHARED_ALIGNMENT_BYTES, cut_for_sharers
from offload.sharing.sum_memory import SumHome, SumLayout, SumRing, ring_bytes
from offload.streams.stream_checker import CheckedStreams, StreamOrderError
from offload.streams.transfer import PendingFree
from offload.weights.units.partition import CutPoint, cut
from offload.weights.units.unit import OffloadUnit

COUNT = 3


class Weights(nn.Module):
    """Sizes that are multiples of the alignments, others, one of another dtype, and one that is frozen."""

    def __init__(self, frozen: bool = False):
        super().__init__()
        sizes = (4096, 2048, 300, 4096, 8192)
        self.wide = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        self.narrow = nn.Parameter(torch.zeros(5000, dtype=torch.bfloat16))
        self.wide[1].requires_grad_(not frozen)


def unit_of(model: nn.Module) -> tuple[OffloadUnit, SumHome]:
    (unit,) = cut_for_sharers(cut(model, [CutPoint("", model)])).units
    return unit, SumHome(unit, HostArena(torch.device("cpu")), NO_SHARERS)


@pytest.mark.parametrize("frozen", [False, True])
def test_sharers_send_all_of_the_sums_home_each_to_its_place(frozen: bool):
    unit, home = unit_of(Weights(frozen))
    for rank in range(COUNT):
        layout = SumLayout(unit, unit.trained, home, COUNT, rank)
        buffers = [torch.zeros(size, dtype=dtype) for dtype, size in layout.sizes]
        for number, (tensor, view) in enumerate(layout.views(buffers).items(), start=1):
            assert view.shape == tensor.shape
            assert view.storage_offset() * view.itemsize % SHARED_ALIGNMENT_BYTES == 0
            # Every element another, as far as the dtype has as many numbers.
            view.copy_(torch.arange(view.numel()) + number)
        for buffer, parts in zip(buffers, layout.parts, strict=True):
            assert buffer.numel() % COUNT == 0
            for part in parts:
                part.home.copy_(buffer[part.place])
    for number, tensor in enumerate(unit.trained, start=1):
        expected = (torch.arange(tensor.host.numel()) + number).to(tensor.dtype)
        assert torch.equal(home.gradients[tensor], expected)


def test_the_layout_is_made_anew_where_other_tensors_train():
    unit, home = unit_of(Weights())
    layout = home.layout()
    assert layout.tensors == unit.trained
    assert home.layout() is layout
    unit.trained[1].host.requires_grad_(False)
    assert home.layout().tensors == unit.trained
    assert len(unit.trained) == len(layout.tensors) - 1


def test_neighbours_go_home_in_one_copy():
    unit, home = unit_of(Weights())
    layout = SumLayout(unit, unit.trained, home, 1, 0)
    joined = {
        dtype: [len(part.tensors) for part in own] for (dtype, _), own in zip(layout.sizes, layout.parts, strict=True)
    }
    assert joined == {torch.float32: [5], torch.bfloat16: [1]}
    assert all(one.place.stop <= other.place.start for own in layout.parts for one, other in pairwise(own))


def test_what_is_frozen_at_home_is_not_written():
    unit, home = unit_of(Weights())
    whole = unit.trained
    frozen = whole[1]
    frozen.host.requires_grad_(False)
    home.gradients[frozen].fill_(7)
    layout = SumLayout(unit, unit.trained, home, 1, 0)
    for (dtype, size), parts in zip(layout.sizes, layout.parts, strict=True):
        for part in parts:
            part.home.copy_(torch.full((size,), 3, dtype=dtype)[part.place])
    assert home.gradients[frozen].eq(7).all()
    assert all(home.gradients[tensor].eq(3).all() for tensor in unit.trained)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_goes_home_is_the_own_slice_of_the_buffer_where_all_has_one_dtype_and_trains(frozen: bool, count: int):
    model = Weights(frozen)
    del model.narrow
    unit, home = unit_of(model)
    layouts = [SumLayout(unit, unit.trained, home, count, rank) for rank in range(count)]
    ((dtype, size),) = layouts[0].sizes
    assert dtype == torch.float32
    assert all(layout.in_slices == [not frozen] for layout in layouts)
    if not frozen:
        own = [part.place for layout in layouts for part in layout.parts[0]]
        assert [place.start for place in own] == [rank * size // count for rank in range(count)]


def test_other_units_are_not_sent_home_in_slices():
    unit, home = unit_of(Weights())
    assert SumLayout(unit, unit.trained, home, COUNT, 0).in_slices == [False, False]


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
