"""Gradients of a model under two processes that share its homes, here threads, and of one process."""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from offload.modes.mode import AttachOptions, Mode
from offload.streams.stream_checker import CheckedStreams
from tests.offload.helpers.shared_training import sum_rest
from tests.offload.helpers.sharers import ThreadSharers, as_sharers

Losses = Sequence[Sequence[Callable[[nn.Module], Tensor]]]
"""of each step those of each process, called with its copy of the model"""
Gradients = dict[str, Tensor | None]


def same_as_one_process(model: nn.Module, make: Callable[[], Mode], losses: Losses) -> None:
    """Fails where a gradient of any step, without updates between, is not that of one process in every bit."""
    results = as_sharers(2, lambda sharers: _shared(sharers, model, make, losses))
    for step, of_step in enumerate(losses):
        expected = _alone(model, of_step)
        for found in results:
            for name, gradient in found[step].items():
                assert (gradient is None) == (expected[name] is None), (step, name)
                assert gradient is None or torch.equal(gradient, expected[name]), (step, name)


def _shared(sharers: ThreadSharers, model: nn.Module, make: Callable[[], Mode], losses: Losses) -> list[Gradients]:
    model, mode, found = copy.deepcopy(model), make(), []
    attached = mode.attach(model, CheckedStreams(torch.device("cpu")), AttachOptions(sharers=sharers))
    for of_step in losses:
        with attached.step():
            attached.accumulate([partial(of_step[sharers.number], model)])
        sum_rest(model, attached, sharers)
        found.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        sharers.laid_down(None)
        model.zero_grad(set_to_none=True)
    sharers.laid_down(None)
    attached.detach()
    return found


def _alone(model: nn.Module, losses: Sequence[Callable[[nn.Module], Tensor]]) -> Gradients:
    total: Gradients = {name: None for name, _ in model.named_parameters()}
    for loss in losses:
        mine = copy.deepcopy(model)
        loss(mine).backward()
        for name, parameter in mine.named_parameters():
            if parameter.grad is not None:
                total[name] = parameter.grad if total[name] is None else total[name] + parameter.grad
    return total
