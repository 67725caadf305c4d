"""tensor_swap moves the right tensors and no others, in steps that end well and in steps that fail."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload.activations.swapper import ActivationSwapper
from offload.modes import tensor_swap
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.tensor_swap import TensorSwap
from offload.streams.transfer import Counters
from tests.offload.helpers.models import Stack, assert_same, same_as_resident, stack_inputs, train, under
from tests.offload.helpers.swapping import Fails


@pytest.fixture(autouse=True)
def little_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few bytes that most saved tensors really leave the device of these small models."""
    monkeypatch.setattr(tensor_swap, "IN_FLIGHT_BYTES", 0)


def test_the_input_batch_and_parameters_are_never_swapped():
    model, mode = nn.Linear(8, 4), TensorSwap(Resident())
    inputs = stack_inputs(0, 0)
    with under(mode, model) as attached:
        for call in (model, lambda batch: model(input=batch)):
            with attached.step():
                call(inputs.t().contiguous().t()).sum().backward()
        assert attached.counters().swapped_bytes == 0
        with attached.step():
            model(inputs).square().sum().backward()
        assert torch.equal(inputs, stack_inputs(0, 0))


def test_swapped_tensors_are_released_and_come_back():
    model, mode = Stack(), TensorSwap(Resident())
    storages = []
    for block in model.blocks[:-1]:
        block.register_forward_hook(lambda *call: storages.append(StorageWeakRef(call[2].untyped_storage())))
    with under(mode, model) as attached:
        with attached.step():
            loss = model(stack_inputs(0, 0)).sum()
            assert all(storage.expired() for storage in storages)
            loss.backward()
        counters = attached.counters()
    assert counters.released_bytes == counters.h2d_bytes
    assert 0.9 * counters.swapped_bytes < counters.h2d_bytes < counters.swapped_bytes
    assert counters.d2h_bytes == counters.swapped_bytes


def test_the_counters_of_weights_and_activations_are_one_set():
    def counters(mode) -> Counters:
        model = Stack()
        with under(mode, model) as attached:
            for _ in range(2):
                with attached.step():
                    model(stack_inputs(0, 0)).sum().backward()
                model.zero_grad()
            return attached.counters()

    modes = (TensorSwap(LayerStream()), LayerStream(), TensorSwap(Resident()))
    both, weights, swap = map(counters, modes)
    for key in ("h2d_bytes", "d2h_bytes", "host_pageable_bytes"):
        assert getattr(both, key) == getattr(weights + swap, key) > 0, key
    assert both.swapped_bytes > 0


def test_the_footprint_is_one_for_weights_and_activations():
    model = Stack()
    mode = TensorSwap(LayerStream(), budget="4MiB")
    plan, weights = mode.footprint(model, recompute=True), LayerStream().footprint(model, recompute=True)
    assert (plan.h2d_bytes, plan.units) == (weights.h2d_bytes, weights.units)
    assert plan.activation_budget_bytes == 4 * 2**20
    assert TensorSwap(Resident(), budget="auto").footprint(model).activation_budget_bytes is None


def test_a_budget_keeps_the_tensors_used_first_and_saves_their_copies():
    model, mode = Stack(), TensorSwap(Resident(), budget=2000)
    with under(mode, model) as attached:
        traffic = []
        for _ in range(3):
            before = attached.counters()
            with attached.step():
                model(stack_inputs(0, 0)).sum().backward()
            model.zero_grad()
            traffic.append(attached.counters().d2h_bytes - before.d2h_bytes)
    assert traffic[0] - 2000 <= traffic[1] == traffic[2] < traffic[0] - 1000


def test_swapped_tensors_come_back_while_backward_uses_the_others(monkeypatch: pytest.MonkeyPatch):
    """As soon as tensors that stayed have been used, the budget has room for those needed next."""
    came_back, fetched = ActivationSwapper._unpack_swapped, []

    def watched(self, packed):
        fetched.append(self.fetched_bytes)
        return came_back(self, packed)

    monkeypatch.setattr(ActivationSwapper, "_unpack_swapped", watched)
    monkeypatch.setattr(tensor_swap, "PREFETCH_BYTES", 0)
    mode, model = TensorSwap(Resident(), budget=9000), Stack(depth=6)
    with under(mode, model) as attached:
        for step in range(2):
            before = attached.counters().activation_h2d_bytes
            fetched.clear()
            with attached.step():
                model(stack_inputs(step, 0)).mean().backward()
    # At the first use of a swapped tensor, some copies are already under way.
    assert fetched[0] > before


def test_evaluation_is_left_alone():
    model, mode = Stack(), TensorSwap(Resident())
    with under(mode, model) as attached:
        with attached.step(), torch.no_grad():
            model(stack_inputs(0, 0))
        with torch.no_grad():
            model(stack_inputs(0, 0))
        assert attached.counters().swapped_bytes == 0


def test_gradients_within_evaluation_are_left_alone():
    class Energy(nn.Module):
        """Its output is a slope, in evaluation too."""

        def __init__(self):
            super().__init__()
            self.body = Stack()

        def forward(self, inputs):
            with torch.enable_grad():
                leaf = inputs.clone().requires_grad_()
                return torch.autograd.grad(self.body(leaf).square().sum(), leaf)[0]

    model, mode = Energy(), TensorSwap(Resident())
    with under(mode, model) as attached, attached.step():
        with torch.no_grad():
            quiet = model(stack_inputs(0, 0))
        assert attached.counters().swapped_bytes == 0
        assert torch.equal(quiet, model(stack_inputs(0, 0)))
        assert attached.counters().swapped_bytes > 0


def test_an_aborted_step_leaves_nothing_and_the_next_is_right():
    model, mode = Stack(), TensorSwap(Resident())
    expected = train(copy.deepcopy(model), Resident(), steps=1)

    def interrupt(*_):
        raise KeyboardInterrupt

    def error(*_):
        raise ValueError

    with under(mode, model) as attached:
        for hook, raised in (
            (interrupt, KeyboardInterrupt),
            (error, ValueError),
            (lambda *call: Fails.apply(call[2]), ZeroDivisionError),
        ):
            handle = model.blocks[2].up.register_forward_hook(hook)
            with pytest.raises(raised), attached.step():
                model(stack_inputs(0, 0)).sum().backward()
            handle.remove()
            model.zero_grad()
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            # The exception's traceback has the tensors of its frames.
            gc.collect()
            with attached.step():
                pool = attached.activations._swapper.pool
            idle_bytes = sum(block.block.bytes.numel() for block in pool.idle_blocks())
            assert idle_bytes == attached.counters().host_pageable_bytes
    assert_same(train(model, mode, steps=1), expected)


def test_an_exception_that_the_caller_catches_closes_what_the_forward_opened():
    model, mode = nn.Sequential(nn.Linear(9, 8)), TensorSwap(Resident())
    with under(mode, model) as attached, attached.step():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(stack_inputs(0, 0))
        nn.Linear(8, 8)(stack_inputs(0, 0)).square().sum().backward()
        assert attached.counters().swapped_bytes == 0


def test_detach_gives_the_model_back():
    model, mode = Stack(), TensorSwap(LayerStream())
    with under(mode, model) as attached, attached.step():
        with pytest.raises(RuntimeError, match="a step is open already"), attached.step():
            pass
        with pytest.raises(RuntimeError, match="detach inside a step"):
            attached.detach()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())
    with pytest.raises(RuntimeError, match="was given back by detach"):
        attached.counters()
    same_as_resident(model, mode)
