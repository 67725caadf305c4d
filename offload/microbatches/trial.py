"""Finds out whether microbatches compute side by side what they compute one after another.

A loss may leave a value in a module that it reads later (`self.aux_loss = ...`), change what a forward does
(`model.eval()`), hook, freeze or replace weights, or draw random numbers without a seed of its own. One after another,
a microbatch sees what it has done itself; side by side, also what the others do meanwhile. So before the first step
both ways run once, forward alone, and are compared bit by bit.
"""

from __future__ import annotations

import contextvars
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offload.microbatches.layer_major import nodes_of
from offload.torch_private.buffer_states import NOTHING, copied, get, put
from offload.torch_private.recomputed_blocks import BlockAttributes, RandomState, buffers_of
from offload.torch_private.threads import SideBySideError

_TENSORS = {"_parameters", "_buffers"}
_CONTAINERS = (dict, OrderedDict, list, set)
Losses = Sequence[Callable[[], Tensor]]


class Result(NamedTuple):
    """The number of a loss, as bytes, and the parameters that get gradients: alike losses have the same."""

    number: bytes
    trained: frozenset[int]


def compute_alike(
    losses: Losses,
    side_by_side: Callable[[Losses], Iterable[Tensor]],
    model: nn.Module,
    device: torch.device,
    weights_now: Callable[[], object],
) -> bool:
    """Tells whether `losses`, functions that return a scalar, are the same side by side as one after another.

    Calls each twice, without a backward. What they leave in modules, in buffers and in random generators is taken back;
    `weights_now` returns what changes where they change weights, which cannot be: raises RuntimeError then. False also
    where one does what only works one after another (SideBySideError).
    """
    before = weights_now()
    # Each has its own context variables, as side by side.
    context = contextvars.copy_context()
    try:
        with _taken_back(model, device):
            apart = [_result(context.copy().run(loss)) for loss in losses]
        with _taken_back(model, device):
            together = [_result(value) for value in side_by_side(losses)]
    except SideBySideError:
        apart, together = [], None
    # A checkpoint of torch that no backward has passed holds its inputs in a circle.
    gc.collect()
    if weights_now() != before:
        raise RuntimeError(
            "a loss or a forward changes, freezes or replaces a weight, which microbatches side by side may not: change"
            " weights between steps, or compute the step in one microbatch"
        )
    return apart == together


def _result(loss: Tensor) -> Result:
    variables = (getattr(node, "variable", None) for node in nodes_of(loss))
    number = loss.detach().to("cpu", copy=True).reshape(-1).view(torch.uint8)
    return Result(bytes(number.tolist()), frozenset(id(variable) for variable in variables if variable is not None))


@contextmanager
def _taken_back(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Surrounds forwards of `model` that leave its modules, their tensors and the random generators as they were."""
    random, attributes = RandomState.of(device), BlockAttributes(model)
    # Such as those of a module's hooks.
    named = (pair for module in model.modules() for pair in vars(module).items() if pair[0] not in _TENSORS)
    contents = [(value, type(value)(value)) for _, value in named if type(value) in _CONTAINERS]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    contents += [(module._parameters, dict(module._parameters)) for module in model.modules()]
    buffers = {place: get(place) for place in buffers_of(model)}
    for place, copy in copied(buffers).items():
        put(place, copy)
    try:
        with attributes.in_recompute():
            yield
    finally:
        # Buffers that the forwards have registered go.
        for place, state in (dict.fromkeys(buffers_of(model), NOTHING) | buffers).items():
            if get(place) is not state:
                put(place, state)
        for value, content in contents:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
        for parameter, trains in flags:
            if parameter.requires_grad != trains:
                parameter.requires_grad_(trains)
        random.restore()
