"""tensor_swap on a real device: the resident model's numbers while every stream in turn is made late."""

import pytest
import torch
from torch import nn

from offload.modes import tensor_swap
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.save_on_cpu import SaveOnCpu
from offload.modes.tensor_swap import TensorSwap
from offload.streams.transfer import Transfer
from tests.offload.helpers.late import ON_A_GPU, gpu_inputs
from tests.offload.helpers.models import Stack, assert_same, same_as_resident, train, under, with_copy
from tests.offload.helpers.modes import recomputing

pytestmark = ON_A_GPU

WEIGHTS = {
    "resident": Resident,
    "layer_stream": lambda: LayerStream(slots=2),
    "bounce_linear": lambda: BounceLinear(slots=2),
}


@pytest.fixture
def little_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps so few copies in flight that most saved tensors of these small models really leave the device."""
    monkeypatch.setattr(tensor_swap, "IN_FLIGHT_BYTES", 0)


@pytest.mark.usefixtures("delayed", "poisoned", "little_in_flight")
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("budget", [0, 20000, "auto"])
def test_equals_resident(budget: int | str, weights: str, checkpointing: str | None):
    mode = TensorSwap(WEIGHTS[weights](), budget=budget)
    same_as_resident(Stack(width=64, recompute=checkpointing, dropout=0.2), mode, gpu_inputs, device="cuda")


@pytest.mark.usefixtures("delayed", "little_in_flight")
def test_equals_resident_with_convolutions_in_bf16():
    model = nn.Sequential(
        nn.Conv1d(5, 16, 3), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(48, 4)
    ).bfloat16()
    same_as_resident(
        model, TensorSwap(Resident()), lambda *place: gpu_inputs(*place).bfloat16().expand(3, 5, 8), device="cuda"
    )


@pytest.mark.usefixtures("little_in_flight")
def test_the_delays_would_show_a_missing_wait(monkeypatch: pytest.MonkeyPatch):
    """The check above can fail: without the wait for copies in, it does."""
    copy = Transfer._copy

    def late_copy(self, pairs, stream, name):
        if stream is self.streams.h2d:
            with self.streams.on(stream):
                torch.cuda._sleep(20_000_000)
        return copy(self, pairs, stream, name)

    monkeypatch.setattr(Transfer, "_copy", late_copy)
    monkeypatch.setattr(Transfer, "await_on", lambda self, stream, event: None)
    with pytest.raises(AssertionError):
        same_as_resident(Stack(width=64), TensorSwap(Resident()), gpu_inputs, device="cuda", steps=1)


@pytest.mark.usefixtures("little_in_flight")
def test_parts_of_a_backward_and_graphs_that_are_dropped(monkeypatch: pytest.MonkeyPatch):
    """Prefetches that were not used do not write over the next owner of the memory or of the host block."""
    monkeypatch.setattr(tensor_swap, "PREFETCH_BYTES", 2**24)
    swapped, resident = with_copy(Stack(width=256))

    def gradients(model: nn.Module, mode) -> list[torch.Tensor]:
        found = []
        with under(mode, model, "cuda") as attached, attached.step():
            for seed in range(6):
                loss = model(gpu_inputs(seed, 0).repeat(50, 1)).square().mean()
                found += torch.autograd.grad(loss, list(model.blocks[-1].parameters()))
                del loss
            model(gpu_inputs(9, 0)).square().mean().backward()
            found += [parameter.grad for parameter in model.parameters()]
        return [gradient.cpu() for gradient in found]

    assert_same(gradients(swapped, TensorSwap(Resident())), gradients(resident, Resident()))


def peak_of_step(mode, model: nn.Module, steps: int = 3) -> int:
    """Returns the peak of device memory in the last step, above the memory before that step."""
    with under(mode, model, "cuda") as attached:
        batch = torch.randn(8192, 8, device="cuda")
        for _ in range(steps):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with attached.step():
                model(batch).square().mean().backward()
        return torch.cuda.max_memory_allocated() - before


def test_memory_is_really_released(monkeypatch: pytest.MonkeyPatch):
    """The peak falls by the bytes that are swapped, less the copies in flight and the budget."""
    for limit in ("IN_FLIGHT_BYTES", "PREFETCH_BYTES"):
        monkeypatch.setattr(tensor_swap, limit, 2**25)
    model = Stack(width=512, depth=8)
    resident = peak_of_step(Resident(), model)
    swapped, half = (peak_of_step(TensorSwap(Resident(), budget=budget), model) for budget in (0, "256MiB"))
    # Of a block: its input, what the norm made of it, and two tensors of twice the width; 16 MiB in a width.
    activations = 8 * 6 * 2**24
    assert resident > activations
    assert swapped < resident - activations / 2
    assert swapped < half < swapped + 2**28 + 2**26
    assert half < resident


def test_only_the_inputs_of_recomputed_blocks_leave():
    model, mode = Stack(width=512, depth=8), recomputing(TensorSwap(Resident()))
    with under(mode, model, "cuda") as attached:
        with attached.step():
            model(torch.randn(8192, 8, device="cuda")).square().mean().backward()
        # The inputs of eight blocks and of the head.
        assert attached.counters().swapped_bytes == 9 * 8192 * 512 * 4


def test_tensors_of_the_host_stay():
    """Indices on the host, saved by an operation on the device, are not touched."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, batch):
            return self.layer(batch)[torch.tensor([0, 2, 3])].square() * torch.ones((), dtype=torch.float32)

    same_as_resident(Mixed(), TensorSwap(Resident()), gpu_inputs, device="cuda")


def test_copies_hide_behind_compute_with_an_automatic_budget():
    model = Stack(width=2048, depth=8).bfloat16()
    mode = TensorSwap(Resident(), budget="auto")
    with under(mode, model, "cuda") as attached:
        batch = torch.randn(16384, 8, device="cuda", dtype=torch.bfloat16)
        for _ in range(24):
            model.zero_grad()
            with attached.step():
                model(batch).square().mean().backward()
        assert not attached.activations._swapper._policy.measures


def test_the_host_goes_on_while_the_device_is_in_the_step():
    model = Stack(width=256).bfloat16()
    mode = TensorSwap(Resident())
    with under(mode, model, "cuda") as attached:
        batch = torch.randn(64, 8, device="cuda", dtype=torch.bfloat16)
        for _ in range(4):
            model.zero_grad()
            end = torch.cuda.Event()
            with attached.step():
                # About a third of a second.
                torch.cuda._sleep(500_000_000)
                model(batch).square().mean().backward()
                end.record()
        assert not end.query()


@pytest.mark.usefixtures("delayed")
def test_save_on_cpu_has_the_residents_loss_and_gradients():
    saved, resident = with_copy(Stack(width=64, dropout=0.2))
    # torch returns contiguous tensors, also for others, and kernels choose by strides. One step without its
    # weights, because AdamW makes whole steps of the least difference between gradients near zero.
    options = {"steps": 1, "device": "cuda"}
    weights = len(list(resident.parameters()))
    torch.testing.assert_close(
        train(saved, SaveOnCpu(Resident()), gpu_inputs, **options)[:-weights],
        train(resident, Resident(), gpu_inputs, **options)[:-weights],
        rtol=1e-3,
        atol=1e-5,
    )
