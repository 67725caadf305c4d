"""none leaves a model on the device, and gives it back as it was."""

from __future__ import annotations

import torch
from torch import nn

from offload.modes.none import Resident
from tests.offload.helpers.models import Stack, attached, stack_inputs


def test_a_step_moves_nothing_and_gradients_are_on_the_device():
    model, mode = Stack(), Resident()
    with attached(mode, model):
        before = mode.counters()
        with mode.step(norms=True):
            (loss,) = mode.accumulate([lambda: model(stack_inputs(0, 0)).square().mean()])
        assert not loss.requires_grad
        assert mode.counters() == before
        assert all(p.grad is not None for p in model.parameters())


def test_everything_is_resident():
    model = Stack()
    plan = Resident().footprint(model)
    assert plan.resident_bytes == sum(p.nbytes for p in model.parameters())
    assert (plan.units, plan.slot_bytes, plan.host_weight_bytes, plan.h2d_bytes, plan.d2h_bytes) == (0, 0, 0, 0, 0)


def test_a_model_of_the_meta_device_gets_memory_and_keeps_its_ties():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
    with attached(Resident(), model):
        assert model[0].weight.device.type == "cpu"
        assert model[1].weight is model[0].weight


def test_one_mode_serves_models_one_after_another():
    mode = Resident()
    for _ in range(2):
        model = Stack()
        with attached(mode, model), mode.step():
            model(stack_inputs(0, 0)).sum().backward()
