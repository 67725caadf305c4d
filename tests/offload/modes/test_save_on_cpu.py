"""save_on_cpu computes the resident model's numbers, and counts the bytes that torch copies."""

import weakref

import pytest
import torch
from torch import nn

from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.save_on_cpu import SaveOnCpu
from tests.offload.helpers.models import Stack, same_as_resident, stack_inputs, under, with_copy
from tests.offload.helpers.modes import WEIGHTS


@pytest.mark.sampled
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("checkpointing", [None, "non-reentrant"])
def test_save_on_cpu_equals_resident(weights: str, checkpointing: str | None):
    same_as_resident(Stack(recompute=checkpointing, dropout=0.3), SaveOnCpu(WEIGHTS[weights]()))


def test_save_on_cpu_copies_what_is_saved_in_a_step():
    model, mode = nn.Linear(8, 4), SaveOnCpu(Resident())
    inputs = stack_inputs(0, 0).requires_grad_()
    with under(mode, model) as attached:
        assert mode.footprint(model).resident_bytes == Resident().footprint(model).resident_bytes
        with attached.step():
            assert model(inputs).grad_fn._saved_mat1 is not None
            hooked = torch._C._autograd._top_saved_tensors_default_hooks(True)
            model.register_forward_pre_hook(
                lambda *_: seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
            )
            seen = []
            model(inputs)
        assert hooked is None
        copied = attached.counters()
        assert "_CountedCopies" in seen[0][0].__qualname__
        assert copied.activation_d2h_bytes == copied.d2h_bytes == 2 * (model.weight.nbytes + inputs.nbytes)
        assert copied.stall_ms is None


def test_a_stall_that_nobody_times_is_unknown_over_any_weights():
    mode, model = SaveOnCpu(LayerStream()), Stack()
    with under(mode, model) as attached:
        with attached.step():
            model(stack_inputs(0, 0)).sum().backward()
        copied, weights = attached.counters(), attached._counters()
    assert weights.stall_ms is not None
    assert copied.stall_ms is None
    assert copied.waited_for_bytes == copied.activation_h2d_bytes + copied.activation_d2h_bytes > 0
    assert copied.h2d_bytes == weights.h2d_bytes + copied.activation_h2d_bytes


def test_another_default_device_does_not_take_the_saved_tensors():
    """torch's own hooks would make the copies there, here without values."""
    ours, theirs = with_copy(Stack())
    inputs = stack_inputs(0, 0)
    for model, mode in ((ours, SaveOnCpu(Resident())), (theirs, Resident())):
        with under(mode, model) as attached, attached.step():
            with torch.device("meta"):
                loss = model(inputs).square().mean()
            loss.backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_forward_without_backward_leaves_nothing():
    """exp saves its result, which refers to exp's node."""
    mode, model = SaveOnCpu(Resident()), nn.Sequential(nn.Linear(8, 4), Exponential())
    inputs = stack_inputs(0, 0)
    given = weakref.ref(inputs)
    with under(mode, model) as attached, attached.step():
        model(inputs)
    del inputs
    assert given() is None


class Exponential(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.exp()


def test_page_locked_memory_is_that_of_torch_s_allocator(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.current": 4096})
    mode = SaveOnCpu(Resident())
    with under(mode, nn.Linear(8, 4)) as attached:
        assert attached.counters().host_pinned_bytes == 4096
