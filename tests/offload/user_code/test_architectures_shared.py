"""Architectures that people train, tiny, on two processes that share their homes: gradients are those of one process.

Each process has its own microbatch. Most are slow tests.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from offload.modes import shard_offload, tensor_swap
from offload.runtime.sharing.sharers import CopyWay
from offload.runtime.streams.stream_checker import CheckedStreams
from tests.offload.helpers.architecture_cases import ARCHITECTURES, MODES, built
from tests.offload.helpers.foreign import fresh, loss_of
from tests.offload.helpers.sharers import ThreadSharers, as_sharers

# The first step shows which gradients land once; from the second on those of what stays are summed inside backward.
STEPS = 3
SHARED = [mode for mode in MODES if mode not in ("tensor_swap", "shard_offload_2", "shard_offload_all")]
WAYS: tuple[CopyWay, ...] = ("slices", "whole")
# In every run of the tests: experts, a scale by itself, and weights that stay, each in one mode.
FAST = {("hidream", "layer_stream"), ("clip", "bounce_linear_all"), ("gpt2", "shard_offload")}
CASES = [
    pytest.param(name, mode, WAYS[(row + column) % 2], marks=() if (name, mode) in FAST else pytest.mark.slow)
    # The autoencoder draws noise in its forward, and threads draw from one generator.
    for row, name in enumerate(name for name in ARCHITECTURES if name != "autoencoder")
    for column, mode in enumerate(SHARED)
]
Gradients = dict[str, Tensor | None]


def loss(model: nn.Module, inputs: dict) -> Tensor:
    return loss_of(model(**fresh(inputs)))


def gradients_of(sharers: ThreadSharers, model: nn.Module, make, inputs: list[list[dict]]) -> list[Gradients]:
    """The gradients of each step, of which the caller sums what the mode leaves."""
    model, mode, found = copy.deepcopy(model), make(), []
    mode.attach(model, CheckedStreams(torch.device("cpu")), sharers)
    for given in inputs:
        with mode.step():
            mode.accumulate([partial(loss, model, given[sharers.number])])
        left = mode.summed_parameters()
        for parameter in model.parameters():
            if parameter not in left:
                everyone = [each for each in sharers.laid_down(parameter.grad) if each is not None]
                total = sum(everyone[1:], everyone[0].clone()) if everyone else None
                sharers.laid_down(None)
                if total is not None and parameter.grad is not None:
                    parameter.grad.copy_(total)
                elif total is not None:
                    parameter.grad = total
                sharers.laid_down(None)
        found.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        sharers.laid_down(None)
        model.zero_grad(set_to_none=True)
    sharers.laid_down(None)
    mode.detach()
    return found


def alone(model: nn.Module, given: list[dict]) -> Gradients:
    """The gradients of one process that adds up those of both."""
    total: Gradients = {name: None for name, _ in model.named_parameters()}
    for inputs in given:
        mine = copy.deepcopy(model)
        loss(mine, inputs).backward()
        for name, parameter in mine.named_parameters():
            if parameter.grad is not None:
                total[name] = parameter.grad if total[name] is None else total[name] + parameter.grad
    return total


@pytest.mark.parametrize(("name", "mode", "copies"), CASES)
def test_two_processes_have_the_gradients_of_one(monkeypatch, name: str, mode: str, copies: CopyWay):
    monkeypatch.setattr(shard_offload, "MIN_BOUNDARY_BYTES", 1)
    for module in (shard_offload, tensor_swap):
        monkeypatch.setattr(module, "IN_FLIGHT_BYTES", 1)
    # Without dropout, which draws, too.
    model, make = built(name).eval(), MODES[mode][0]
    inputs = [[ARCHITECTURES[name].inputs() for _ in range(2)] for _ in range(STEPS)]
    results = as_sharers(2, lambda sharers: gradients_of(sharers, model, make, inputs), copies=copies)
    for step, given in enumerate(inputs):
        expected = alone(model, given)
        for found in results:
            for key, gradient in found[step].items():
                assert (gradient is None) == (expected[key] is None), (step, key)
                assert gradient is None or torch.equal(gradient, expected[key]), (step, key)
