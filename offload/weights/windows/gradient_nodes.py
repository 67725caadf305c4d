"""The nodes of stand-ins in autograd's graph, through which their gradients leave.

A stand-in is joined to its host parameter, so that hooks, `autograd.grad` and `backward(inputs=)` find the parameter.
Its node gets the sum of the gradients of all uses, and gives it to a `GradientSink`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from offload.torch_private.torch_internals import compiles_frames, is_traced, left_out_of_graphs, set_sequence_number
from offload.weights.units.unit import OffloadUnit, UnitTensor

# Nodes of this number or a higher one are not put in another order by microbatches side by side.
AT_ONCE = 2**63
GONE = "backward of a forward whose offload mode is gone: keep the mode until backward has ended"


class GradientSink(Protocol):
    """Takes the gradients of stand-ins."""

    def land(
        self, unit: OffloadUnit, tensor: UnitTensor, gradient: torch.Tensor, node: torch.autograd.graph.Node
    ) -> torch.Tensor | None:
        """Takes the sum of the gradients of a stand-in, on the device. `node` accumulates them into the host parameter.

        Returns what the node gets: a gradient in host memory, or None.
        """
        ...

    def before_host_gradient(self, unit: OffloadUnit, tensor: UnitTensor) -> None:
        """Called before autograd adds a gradient to that of the host parameter, where a loss has used it directly."""
        ...


class OnDevice(torch.autograd.Function):
    """Joins a stand-in to its host parameter in autograd's graph, so that the parameter's gradients can be asked for.

    Its backward gets the sum of the gradients of all uses on the device, as the leaf of a resident parameter would. Its
    node has the node that accumulates into the parameter as `accumulates`. `sent_to` are weak references to the sink,
    the unit and its tensor.
    """

    @staticmethod
    def forward(ctx, host: nn.Parameter, view: torch.Tensor, sent_to: tuple[weakref.ref, ...]) -> torch.Tensor:
        ctx.sent_to = sent_to
        ctx.set_materialize_grads(False)
        # Autograd would take the input itself for a view of it. `.data` has a version counter of its own.
        return view.data

    @staticmethod
    def backward(ctx, gradient: torch.Tensor | None) -> tuple:
        if gradient is None:
            # No use of it has one, as of a bias in a second derivative: a resident leaf gets none either.
            return None, None, None
        # What `left_out_of_graphs` does, without its call.
        if is_traced() or compiles_frames() is not None or torch.is_grad_enabled():
            return _landed(ctx, gradient), None, None
        sink, unit, tensor = ctx.sent_to
        if (to := sink()) is None:
            raise RuntimeError(GONE)
        return to.land(unit(), tensor(), gradient, ctx.accumulates), None, None


@left_out_of_graphs
def _landed(ctx, gradient: torch.Tensor) -> torch.Tensor | None:
    # With `create_graph`, operations of backward would make a graph.
    with torch.no_grad():
        return OnDevice.backward(ctx, gradient)[0]


class _Share(torch.autograd.Function):
    """The identity, whose backward runs when the gradients of all uses of its result are summed."""

    @staticmethod
    def forward(ctx, parameter: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return memory.detach()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor | None) -> tuple:
        return gradient, None


def share_of(parameter: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over `memory`, a detached `parameter`, that sums the gradients of its uses for `parameter`."""
    with torch.enable_grad():
        share = _Share.apply(parameter, memory)
    set_sequence_number(share.grad_fn, AT_ONCE)
    return share


def joined_to_host(unit: OffloadUnit, tensor: UnitTensor, view: torch.Tensor, sink: GradientSink) -> torch.Tensor:
    """Returns a tensor over `view` whose gradient goes to `sink`, and whose node comes before that of the parameter."""
    # It may outlive the step, and must not keep the device's memory alive where a mode is dropped.
    sent_to = weakref.ref(sink), weakref.ref(unit), weakref.ref(tensor)
    with torch.inference_mode(False), torch.enable_grad():
        joined = OnDevice.apply(tensor.host, view, sent_to)
    # Kept there, because autograd makes a list of new objects whenever it is asked for the next nodes.
    joined.grad_fn.accumulates = accumulates = joined.grad_fn.next_functions[0][0]
    accumulates.register_prehook(functools.partial(_before_host_gradient, *sent_to))
    # Run as soon as it is ready, as autograd runs what accumulates gradients.
    set_sequence_number(joined.grad_fn, AT_ONCE)
    return joined


def _before_host_gradient(
    sink: Callable[[], GradientSink | None],
    unit: Callable[[], OffloadUnit | None],
    tensor: Callable[[], UnitTensor | None],
    gradients: tuple[torch.Tensor | None, ...],
) -> None:
    if gradients[0] is not None and (to := sink()) is not None:
        to.before_host_gradient(unit(), tensor())
