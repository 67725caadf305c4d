"""Weight streaming on a real device gives the resident model's numbers while each stream in turn is late.

A GPU test could pass because the host is slow. So spinning kernels delay each stream, and freed slots are filled with
NaN: then a missing wait shows in the numbers.
"""

import functools
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.files import file_filler
from offload.memory.host_memory import HostArena
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import AttachOptions, Mode
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.streams import registry
from offload.streams.transfer import Transfer
from tests.offload.helpers.late import DELAY_CYCLES, ON_A_GPU, gpu_inputs, make_late
from tests.offload.helpers.mapped import trained, with_low_rank, write_frozen
from tests.offload.helpers.models import Stack, assert_same, same_as_resident, stack_inputs, train, under, with_copy

pytestmark = ON_A_GPU


@pytest.mark.usefixtures("delayed", "poisoned")
@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("mode", [BounceLinear, LayerStream])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_equals_resident(slots: int, mode: type, recompute: str | None):
    model = Stack(width=64, recompute=recompute, dropout=0.2)
    same_as_resident(model, mode(slots=slots), gpu_inputs, device="cuda")


@pytest.mark.usefixtures("delayed", "poisoned")
def test_equals_resident_in_bf16_with_convolutions():
    model = nn.Sequential(nn.Conv1d(5, 16, 3), nn.BatchNorm1d(16), nn.GELU(), nn.Flatten(), nn.Linear(96, 4)).bfloat16()
    same_as_resident(
        model, BounceLinear(slots=1), lambda *place: gpu_inputs(*place).bfloat16().expand(3, 5, 8), device="cuda"
    )


@pytest.mark.usefixtures("delayed", "poisoned")
@pytest.mark.parametrize("where", ["inference", "lone forwards"])
@pytest.mark.parametrize("mode", [BounceLinear, LayerStream, lambda slots: ShardOffload(shards=2, slots=slots)])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_forwards_in_a_row_and_weights_that_change_right_after(slots: int, mode: type, where: str):
    def run(model: nn.Module, mode: Mode) -> list[torch.Tensor]:
        seen = []
        with under(mode, model, "cuda") as attached:
            for _ in range(3):
                with attached.inference() if where == "inference" else torch.no_grad():
                    # Of several shapes.
                    seen += [model(gpu_inputs(index, 0)[: 1 + index % 3]).clone() for index in range(6)]
                for parameter in model.parameters():
                    parameter.data.mul_(1.5)
        return [result.cpu() for result in seen]

    streamed, resident = with_copy(Stack(width=64))
    assert_same(run(streamed, mode(slots=slots)), run(resident, Resident()))


class Statistics(nn.Module):
    """Buffers that forward updates, a bare parameter, a recurrent layer; recomputed by wrapping each block."""

    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8)
            self.recurrent = nn.GRU(8, 8)
            self.scale = nn.Parameter(torch.full((8,), 1.5))

        def forward(self, hidden):
            return self.recurrent(self.norm(self.layer(hidden * self.scale)))[0] + hidden

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Unit() for _ in range(3))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = checkpoint(block.forward, hidden, use_reentrant=False)
        return hidden


@pytest.mark.usefixtures("delayed", "poisoned")
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("slots", [1, 2])
def test_buffers_bare_parameters_and_recurrent_layers(slots: int):
    same_as_resident(Statistics(), LayerStream(slots=slots), gpu_inputs, device="cuda")


@pytest.mark.parametrize("broken", ["ready", "free"])
def test_the_delays_would_show_a_missing_wait(broken: str, monkeypatch: pytest.MonkeyPatch, poisoned: None):
    """The tests above can fail: without one kind of wait they do."""
    make_late(monkeypatch, "h2d" if broken == "ready" else "compute")
    if broken == "ready":
        monkeypatch.setattr(Transfer, "await_on", lambda self, stream, event: None)
    else:
        waits = registry.CudaStreams

        class Unordered(waits):
            def event(self, timing: bool = False):
                event = super().event(timing)
                return event if timing else _Unrecorded(event)

        monkeypatch.setattr(registry, "CudaStreams", Unordered)
    streamed, resident = with_copy(Stack(width=64))
    broken_run = train(streamed, BounceLinear(slots=2), gpu_inputs, device="cuda", steps=2)
    monkeypatch.undo()
    expected = train(resident, Resident(), gpu_inputs, device="cuda", steps=2)
    assert any(not torch.equal(one, other) for one, other in zip(broken_run, expected, strict=True))


class _Unrecorded(torch.cuda.Event):
    """An event that is never recorded: a wait for it orders nothing."""

    def __new__(cls, event: torch.cuda.Event):
        return super().__new__(cls)

    def __init__(self, event: torch.cuda.Event):
        pass

    def record(self, stream=None) -> None:
        pass


def test_blocks_are_page_locked_in_place_at_exact_size():
    arena = HostArena(torch.device("cuda"))
    block = arena.allocate(3 * 2**20 + 17, "weights")
    assert block.bytes.is_pinned()
    assert arena.pinned_bytes == 3 * 2**20 + 17
    arena.close()
    assert not block.bytes.is_pinned()
    assert not HostArena(torch.device("cuda"), pin=False).allocate(4096, "weights").bytes.is_pinned()


def test_a_model_on_the_second_device_while_the_first_is_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    second = functools.partial(stack_inputs, device="cuda:1")
    same_as_resident(Stack(width=64), BounceLinear(slots=2), second, device="cuda:1")


def test_a_forward_on_a_side_stream_is_ordered():
    streamed, resident = with_copy(Stack(width=64))
    side = torch.cuda.Stream()

    def run(mode, model: nn.Module) -> list[torch.Tensor]:
        with under(mode, model, "cuda") as attached:
            # Resident tensors were placed on the current stream.
            side.wait_stream(torch.cuda.current_stream())
            with attached.step(), torch.cuda.stream(side):
                torch.cuda._sleep(DELAY_CYCLES)
                model(gpu_inputs(0, 0)).square().mean().backward()
            torch.cuda.synchronize()
            return [p.grad.cpu() for p in model.parameters()]

    assert_same(run(BounceLinear(slots=1), streamed), run(Resident(), resident))


def test_a_step_allocates_nothing_on_the_device_after_the_first():
    model, mode = Stack(width=256, recompute="non-reentrant"), LayerStream(slots=2)
    with under(mode, model, "cuda") as attached:
        allocations = []
        for step in range(6):
            with attached.step():
                model(gpu_inputs(step, 0)).square().mean().backward()
            model.zero_grad()
            allocations.append(torch.cuda.memory_stats()["num_device_alloc"])
    assert allocations[1:] == allocations[1:2] * 5


@pytest.mark.usefixtures("delayed", "poisoned")
@pytest.mark.parametrize("mode", [BounceLinear, LayerStream])
def test_a_loss_that_uses_weights_on_the_host_adds_its_gradient_to_the_one_that_landed(mode: type):
    def decay(model: nn.Module) -> torch.Tensor:
        return sum(p.square().sum() for p in model.blocks.parameters())

    streamed, resident = with_copy(Stack(width=64))
    found = []
    for model, how in ((streamed, mode(slots=2)), (resident, Resident())):
        with under(how, model, "cuda") as attached, attached.step():
            (model(gpu_inputs(0, 0)).square().mean() + decay(model).to("cuda")).backward()
        found.append([p.grad.cpu() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", [BounceLinear(), LayerStream(slots=2)], ids=["bounce_linear", "layer_stream"])
def test_backward_runs_in_the_thread_of_the_step(mode):
    """In another one it would wait for Python's lock at every gradient."""
    model, threads = Stack(width=64), []
    with under(mode, model, "cuda") as attached, attached.step():
        loss = model(gpu_inputs(0, 0)).sum()
        loss.register_hook(lambda _: threads.append(threading.get_ident()))
        loss.backward()
    assert threads == [threading.get_ident()]


@pytest.mark.usefixtures("delayed", "poisoned")
@pytest.mark.parametrize("ring_units", [1, 4])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    ("kind", "knobs"),
    [(LayerStream, {"slots": 2, "trained": "device"}), (ShardOffload, {"shards": 3, "trained": "device"})],
)
def test_numbers_are_those_of_memory(kind, knobs, direct: bool, ring_units: int, tmp_path: Path, monkeypatch):
    def model():
        torch.manual_seed(0)
        return with_low_rank(Stack(width=64, depth=5))

    expected = trained(model(), kind(**knobs), device="cuda")
    monkeypatch.setattr(file_filler, "RING_BLOCKS", ring_units)
    if direct:
        monkeypatch.setattr(file_filler, "free_host_bytes", lambda: 0)
    mapped = model()
    mode, options = kind(source="mapped", **knobs), AttachOptions(spans=write_frozen(mapped, tmp_path))
    assert_same(trained(mapped, mode, device="cuda", options=options), expected)
