"""Gradients that land: copied, added to earlier ones and measured."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload.memory.host_memory import HostArena, aligned
from offload.modes.layer_stream import LayerStream
from offload.streams.stream_checker import CheckedStreams, StreamOrderError
from offload.streams.transfer import Telemetry, Transfer
from offload.weights.gradients import offloader
from offload.weights.gradients.offloader import (
    PIECE,
    GradientOffloader,
    GradientRing,
    Landing,
    gradient_ring_bytes,
    l2_norm,
)
from offload.weights.units.partition import cut
from offload.weights.units.unit import OffloadUnit, UnitTensor
from tests.offload.helpers.models import Stack, under
from tests.offload.helpers.units import tensor_of, unit_of_two
from tests.offload.helpers.updates import DTYPES, MODES, Mixed, made, one_step
from training.run.loop import gradient_norm

pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture
def at_home() -> OffloadUnit:
    unit = unit_of_two()
    arena = HostArena(torch.device("cpu"))
    unit.bring_home(arena)
    unit.make_gradient_homes(arena)
    return unit


def of(value: float) -> torch.Tensor:
    """A gradient on the device."""
    return torch.full((1,), value)


def land(gradients: GradientOffloader, unit: OffloadUnit, tensor: UnitTensor, gradient: torch.Tensor) -> list[Landing]:
    """Lands a gradient that does not wait for others, and frees the device's copy."""
    batch = gradients.land(unit, tensor, gradient, is_final=False) + gradients.send()
    gradients.free([landing.leaving for landing in batch])
    return batch


def test_a_gradient_lands_in_host_memory(at_home: OffloadUnit, streams: CheckedStreams):
    tensor, on_device = at_home.tensors[0], of(2.0)
    gradients = GradientOffloader(Transfer(streams, Telemetry(streams)), limit_bytes=64)
    gradients.begin_step([at_home], norms=False)
    (landing,) = land(gradients, at_home, tensor, on_device)
    assert landing.leaving.tensor is on_device
    assert tensor.host.grad is tensor.gradient.memory
    assert tensor.gradient.memory.item() == 2.0
    assert tensor.gradient.is_as_landed(tensor.host)
    assert gradients.norms([at_home]) == {}
    tensor.gradient.memory.mul_(2)
    assert not tensor.gradient.is_as_landed(tensor.host)


def test_a_second_gradient_is_added_and_norms_are_of_the_sum(at_home: OffloadUnit, streams: CheckedStreams):
    first, second = at_home.tensors
    gradients = GradientOffloader(Transfer(streams, Telemetry(streams)), limit_bytes=64)
    gradients.begin_step([at_home], norms=True)
    for tensor, value in ((first, 2.0), (second, 1.0), (first, -5.0)):
        land(gradients, at_home, tensor, of(value))
    gradients.release()
    assert (first.gradient.memory.item(), second.gradient.memory.item()) == (-3.0, 1.0)
    assert {parameter: norm.item() for parameter, norm in gradients.norms([at_home]).items()} == {
        first.host: 3.0,
        second.host: 1.0,
    }
    second.host.grad = torch.ones(1)
    assert set(gradients.norms([at_home])) == {first.host}
    gradients.begin_step([at_home], norms=True)
    assert gradients.norms([at_home]) == {}


def test_compute_waits_for_the_oldest_gradients_beyond_the_limit(at_home: OffloadUnit, streams: CheckedStreams):
    telemetry = Telemetry(streams)
    transfer = Transfer(streams, telemetry)
    gradients, waited = GradientOffloader(transfer, limit_bytes=4), []
    transfer.await_on = lambda stream, event: (waited.append(event), stream.wait_event(event))
    leaving = [land(gradients, at_home, tensor, of(1.0))[0].leaving for tensor in at_home.tensors]
    assert waited == [leaving[0].done]
    gradients.release()
    assert waited == [one.done for one in leaving]


def test_small_gradients_leave_together(at_home: OffloadUnit, streams: CheckedStreams):
    first, second = at_home.tensors
    gradients = GradientOffloader(Transfer(streams, Telemetry(streams)), limit_bytes=1024)
    gradients.begin_step([at_home], norms=True)
    assert gradients.land(at_home, first, of(3.0), is_final=False) == []
    assert first in gradients.waiting
    assert first.host.grad is None
    assert gradients.land(at_home, second, of(4.0), is_final=True) == []
    batch = gradients.send()
    assert [(landing.tensor, landing.is_final) for landing in batch] == [(first, False), (second, True)]
    assert batch[0].leaving.done is batch[1].leaving.done is first.gradient.landed is second.gradient.landed
    assert (first.host.grad.item(), second.host.grad.item()) == (3.0, 4.0)
    assert first not in gradients.waiting
    assert gradients.send() == []
    # Those that have earlier gradients are added to them together.
    gradients.free([landing.leaving for landing in batch])
    for tensor in (second, first):
        assert gradients.land(at_home, tensor, of(1.0), is_final=True) == []
    gradients.free([landing.leaving for landing in gradients.send()])
    gradients.release()
    assert (first.host.grad.item(), second.host.grad.item()) == (4.0, 5.0)
    assert [norm.item() for norm in gradients.norms([at_home]).values()] == [4.0, 5.0]


@pytest.mark.parametrize("pieces", [1, 2])
def test_norms_round_as_those_of_gradients_in_the_order_of_the_parameter(streams: CheckedStreams, pieces: int):
    """As `none` takes them. Backward of a convolution makes gradients in another order of memory."""
    weight = nn.Parameter(torch.zeros(16, 16, 3, 3, dtype=torch.bfloat16))
    tensor = tensor_of(weight)
    unit = OffloadUnit("block", 0, [tensor])
    unit.make_gradient_homes(HostArena(torch.device("cpu")))
    gradients = GradientOffloader(Transfer(streams, Telemetry(streams)), limit_bytes=2**20)
    generator = torch.Generator().manual_seed(0)
    orders = 0
    for _ in range(8):
        gradients.begin_step([unit], norms=True)
        made = torch.randn(weight.shape, generator=generator).bfloat16().to(memory_format=torch.channels_last)
        for _ in range(pieces):
            land(gradients, unit, tensor, made.clone())
        gradients.release()
        taken, whole = gradients.norms([unit])[tensor.host], made * pieces
        assert torch.equal(taken, torch.linalg.vector_norm(whole.contiguous(), dtype=torch.float32))
        orders += not torch.equal(taken, torch.linalg.vector_norm(whole, dtype=torch.float32))
        tensor.host.grad = None
    assert orders, "both orders round alike in all"


def test_gradients_of_another_stream_leave_by_themselves(at_home: OffloadUnit, streams: CheckedStreams):
    """The copies come after the work of the stream that made the gradients, whatever the stream when they leave."""
    first, second = at_home.tensors
    gradients = GradientOffloader(Transfer(streams, Telemetry(streams)), limit_bytes=1024)
    with streams.on(streams.gather):
        assert gradients.land(at_home, first, of(3.0), is_final=False) == []
    assert [landing.tensor for landing in gradients.land(at_home, second, of(4.0), is_final=False)] == [first]
    assert [landing.tensor for landing in gradients.send()] == [second]
    assert (first.host.grad.item(), second.host.grad.item()) == (3.0, 4.0)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sampled
def test_norms_taken_on_the_way_are_those_of_the_gradients(dtype: str, mode: str, microbatches: int):
    model, mode = made(Mixed, DTYPES[dtype]), MODES[mode]()
    with under(mode, model) as attached:
        for step in range(4):
            one_step(model, attached, step, microbatches, norms=step != 1)
            norms = attached.gradient_norms()
            trained = [p for p in model.blocks[0].parameters() if p.grad is not None]
            assert set(norms) >= set(trained) if step != 1 else not norms
            assert set(norms) <= {p for p in model.parameters() if p.grad is not None}
            for parameter, norm in norms.items():
                assert norm.dtype == torch.float32
                assert norm.item() == pytest.approx(parameter.grad.double().norm().item(), rel=1e-6)
            whole = torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm()
            assert gradient_norm(model, norms) == pytest.approx(whole.item(), rel=1e-6)
            model.zero_grad()


@pytest.mark.parametrize("who", ["a hook", "the caller"])
def test_norms_are_of_gradients_as_they_are_when_asked_for(who: str):
    def grow(parameter: nn.Parameter) -> None:
        parameter.grad.mul_(10)

    model, mode = made(Stack), LayerStream(slots=2)
    changed = list(model.blocks[1].parameters())
    if who == "a hook":
        for parameter in changed:
            parameter.register_post_accumulate_grad_hook(grow)
    with under(mode, model) as attached:
        one_step(model, attached, norms=True)
        if who == "the caller":
            for parameter in changed:
                grow(parameter)
        norms = attached.gradient_norms()
        assert norms
        assert gradient_norm(model, norms) == pytest.approx(gradient_norm(model, {}), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [0, 1, PIECE, PIECE + 1, 3 * PIECE, 1 << 24])
def test_it_is_right_for_any_number_of_elements(count: int, dtype: torch.dtype):
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)).mul_(1e-4).to(dtype)
    norm = l2_norm(values)
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    assert norm.item() == pytest.approx(values.double().norm().item(), rel=1e-5)


def test_torch_s_own_would_not_do():
    """The day it does, this file can go."""
    values = torch.full((1 << 24,), 1e-4)
    exact = values.double().norm().item()
    assert torch.linalg.vector_norm(values).item() != pytest.approx(exact, rel=1e-4)
    assert l2_norm(values).item() == pytest.approx(exact, rel=1e-5)


def test_shape_and_order_in_memory_change_no_bit():
    values = torch.randn(64, 48, 5, 7)
    other = values.to(memory_format=torch.channels_last)
    assert values.numel() > PIECE
    assert torch.equal(l2_norm(values), l2_norm(other))
    assert torch.equal(l2_norm(values), l2_norm(values.flatten()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, -1])
def test_what_is_not_finite_shows(value: float, at: int):
    values = torch.zeros(2 * PIECE + 3)
    values[at] = value
    assert not l2_norm(values).isfinite()


def test_it_has_no_graph():
    assert not l2_norm(torch.ones(2 * PIECE, requires_grad=True)).requires_grad


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
    monkeypatch.setattr(offloader, "LEAST_RING_BYTES", 5 * block)
    assert gradient_ring_bytes(units) == 5 * block
    monkeypatch.setattr(offloader, "LEAST_RING_BYTES", 0)
    assert gradient_ring_bytes(units) == 4 * block
    assert gradient_ring_bytes(units[:2]) == 2 * block
    assert gradient_ring_bytes([]) == 0
