"""The order of several microbatches in one step: one after another, or all through the same layers (layer-major).

A loss may leave a value in a module that it reads later (`self.aux_loss = ...`), change what a forward does
(`model.eval()`), hook, freeze or replace weights, or draw random numbers without a seed of its own. One after another,
a microbatch sees what it has done itself; side by side, also what the others do meanwhile. So before the first step
both ways run once, forward alone, and are compared bit by bit (`compute_alike`).
"""

from __future__ import annotations

import contextvars
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offload.microbatches.lockstep import Lockstep, Threads
from offload.streams.registry import Streams
from offload.torch_private.buffer_states import NOTHING, copied, get, put
from offload.torch_private.module_contexts import SideBySideError
from offload.torch_private.recomputed_blocks import BlockAttributes, RandomState, buffers_of, look_again
from offload.torch_private.torch_internals import sequence_number, set_sequence_number

# Autograd gives the nodes that accumulate gradients numbers from here on, so that they run as soon as they can.
_ACCUMULATE_GRAD_NUMBERS = 2**63


def one_after_another(
    losses: Sequence[Callable[[], Tensor]], before_last: Callable[[], None] = lambda: None
) -> list[Tensor]:
    """Computes each loss, a scalar, and its gradients before the next loss. Returns the losses, detached.

    `before_last` is called before the last microbatch: the gradients that follow are final.
    """
    values = []
    for number, loss in enumerate(losses, start=1):
        if number == len(losses):
            before_last()
        value = loss()
        value.backward()
        values.append(value.detach())
    return values


class LayerMajor:
    """Sends every microbatch through the same layers before the next layers, in forward and in backward.

    So streamed weights and gradients are copied once. The model is divided into places, numbered in the order of
    forward; `enter(place)` must be called where the layers of a place begin.
    """

    def __init__(
        self,
        streams: Streams,
        around_turn: Callable[[int], AbstractContextManager] = lambda microbatch: nullcontext(),
    ):
        """Takes `around_turn`, which makes a context for each turn of a microbatch in forward."""
        self._streams = streams
        self._around_turn = around_turn
        self._threads = Threads()
        self._lockstep: Lockstep | None = None

    def enter(self, place: int) -> None:
        """Called in forward. Returns when it is this microbatch's turn at `place`: at once if it is the only one."""
        if self._lockstep is not None and self._lockstep.pause(place):
            look_again()

    def accumulate(
        self,
        losses: Sequence[Callable[[], Tensor]],
        before_last: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """Computes every loss and the gradients of all. Returns the losses, detached, in order.

        `before_last` is called before the last backward: the gradients that follow are final.

        In backward, too, the microbatches pass each place in their order: gradients are added as if they ran one after
        another, and are equal bit for bit. Each has a backward of its own where three or more take different ways
        through the places, on which the order would depend, and where there are reentrant checkpoints, which deliver
        the gradients of a weight's uses one by one.
        """
        if len(losses) == 1:
            return one_after_another(losses, before_last)
        with self._in_turns(losses) as values:
            one_way = len(losses) == 2 or self._lockstep.all_took_one_way
            together = one_way and not any(map(_has_reentrant_checkpoints, values))
            if together:
                for index, value in enumerate(values):
                    _renumber(value, self._order(index, len(losses)))
        passes = [values] if together else [[value] for value in values]
        for number, losses_of_pass in enumerate(passes, start=1):
            if number == len(passes):
                before_last()
            torch.autograd.backward(losses_of_pass)
        return [value.detach() for value in values]

    def forwards(self, losses: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Computes every loss as `accumulate` does, and no gradients. Returns the losses, in order."""
        with self._in_turns(losses) as values:
            return values

    @contextmanager
    def _in_turns(self, losses: Sequence[Callable[[], Tensor]]) -> Iterator[list[Tensor]]:
        """Gives the losses, computed in turns, while it is known which turn made which node of their graphs."""
        self._lockstep = Lockstep(losses, self._streams, self._threads, self._around_turn)
        try:
            yield self._lockstep.run()
        except BaseException:
            # An aborted thread may have hooks on saved tensors open, which torch's module hooks close on an Exception
            # only. They would see the tensors of the next step. They end with the thread.
            self._threads.close()
            raise
        finally:
            self._lockstep = None

    def close(self) -> None:
        """Ends the threads of the microbatches."""
        self._threads.close()

    def _order(self, index: int, count: int) -> Callable[[int], int]:
        """Returns the function that gives nodes of microbatch `index` their new number, given the old one.

        Nodes are ordered by turn, within a turn by microbatch, the first highest, and then by the old number.
        """
        turn_of = self._lockstep.turn_of
        return lambda number: (turn_of(index, number) * count + count - 1 - index << 32) + number


def _renumber(loss: Tensor, order: Callable[[int], int]) -> None:
    """Gives the autograd nodes that lead to `loss` new numbers.

    Autograd's engine always runs the node with the highest number that is ready: as a rule the one recorded last. But
    numbers count in each thread, so the numbers of different threads cannot be compared.
    """
    for node in nodes_of(loss):
        number = sequence_number(node)
        if number < _ACCUMULATE_GRAD_NUMBERS:
            set_sequence_number(node, order(number))


def _has_reentrant_checkpoints(loss: Tensor) -> bool:
    """Tells whether nodes that lead to `loss` are reentrant checkpoints, torch's own or those of DeepSpeed."""
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes_of(loss))


def nodes_of(loss: Tensor) -> Iterator[torch.autograd.graph.Node]:
    """Yields the autograd nodes that lead to `loss`, each once."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


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

    Calls each twice, without a backward, and takes back what they leave in modules, buffers and random generators.
    Raises RuntimeError where `weights_now` shows a change of weights. False also after a SideBySideError.
    """
    before, collects = weights_now(), gc.isenabled()
    # Each has its own context variables, as side by side.
    context = contextvars.copy_context()
    # A checkpoint of torch that no backward has passed holds its inputs in a circle. Collections of young objects alone
    # find these, since nothing grows old meanwhile; one of all objects stops the host for 150 ms.
    gc.disable()
    try:
        with _taken_back(model, device):
            apart = [_result(context.copy().run(loss)) for loss in losses]
        gc.collect(0)
        with _taken_back(model, device):
            together = [_result(value) for value in side_by_side(losses)]
    except SideBySideError:
        apart, together = [], None
    finally:
        gc.collect(0)
        if collects:
            gc.enable()
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
