"""Device stand-ins of a unit's parameters and buffers: the tensors that modules hold inside a window."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from offload.runtime.buffer_states import changes_unseen, may_change, version
from offload.runtime.device_slots import DeviceSlot, DeviceSlots
from offload.runtime.running_microbatch import running_microbatch
from offload.runtime.tensor_parts import STATE, parts, replaced_in, state_of, wraps
from offload.runtime.torch_internals import (
    left_out_of_graphs,
    set_sequence_number,
    storage_address,
    tree_leaves,
    tree_map,
)
from offload.weights.layouts import over
from offload.weights.placement import ModuleAttribute, give_memory
from offload.weights.unit_tensor import UnitTensor
from offload.weights.units import OffloadUnit


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


# The mark on a stand-in whose `data` was asked for.
_DATA_TAKEN = "_data_was_taken"
# Nodes of this number or a higher one are not put in another order by microbatches side by side.
AT_ONCE = 2**63


def install_stand_ins(unit: OffloadUnit, slot: DeviceSlot, sink: GradientSink) -> None:
    """Makes modules hold the unit's tensors as views of `slot`.

    Where a module holds another tensor than the host's, that is its user's own (`torch.func.functional_call`, a buffer
    of another shape) and takes part in the forward: it is left, or goes to the device, through autograd, for as long.
    `sink` gets the gradient of a parameter when autograd has summed it.
    """
    for tensor in unit.tensors:
        stand_in = None
        for attribute in tensor.attributes:
            current = attribute.tensor
            if current is tensor.host:
                stand_in = stand_in if stand_in is not None else _stand_in(unit, tensor, slot, sink)
                attribute.assign(stand_in)
                tensor.installed.append((attribute, stand_in, None))
            elif current is not None and current.device != slot.bytes.device and current.device.type == "cpu":
                own = current.to(slot.bytes.device)
                attribute.assign(own)
                tensor.installed.append((attribute, own, current))


def remove_stand_ins(unit: OffloadUnit, slot: DeviceSlot) -> list[UnitTensor]:
    """Makes modules hold the unit's host tensors. Returns those that forward may have changed in the slot."""
    changed = []
    for tensor in unit.tensors:
        for attribute, stand_in, own in tensor.installed:
            if own is not None:
                _put_back(tensor, attribute, stand_in, own)
            elif _is_stand_in(attribute.tensor, stand_in, slot) or (
                tensor.is_buffer and _take_replacement(tensor, attribute)
            ):
                attribute.assign(tensor.host)
        if tensor.device is not None and tensor.installed:
            may_have_changed = _may_have_changed(tensor) if tensor.is_buffer else _was_changed(tensor, slot)
            if may_have_changed:
                changed.append(tensor)
                if tensor.own_copy is not None:
                    for target, source in zip(parts(tensor.device), parts(tensor.own_copy), strict=True):
                        target.data.copy_(source)
        tensor.own_copy = None
        tensor.installed.clear()
    return changed


def drop_stand_ins(unit: OffloadUnit) -> None:
    """Forgets the unit's stand-ins: the next window makes new ones."""
    for tensor in unit.tensors:
        tensor.device = tensor.joined = None
        tensor.shares.clear()
        # What forward changed on the device has changed at home.
        for _ in range(tensor.writes):
            torch.autograd.graph.increment_version(tensor.host)
        tensor.writes = 0


def copy_of_stand_in(unit: OffloadUnit, tensor: UnitTensor, slot: DeviceSlot, sink: GradientSink) -> torch.Tensor:
    """Returns a copy of the stand-in, which needs no slot. For autograd it is a use of the stand-in."""
    views = [view.data for view in tensor.views_of(slot.bytes)]
    if not tensor.trains:
        copies = [view.clone() for view in views]
        return over(tensor.host, copies) if tensor.is_buffer else _frozen(tensor.host, copies)
    copy = _joined(unit, tensor, views[0], sink).clone()
    if copy.grad_fn is not None:
        # Its gradient is added to those of other uses when it is made, as without the copy.
        set_sequence_number(copy.grad_fn, AT_ONCE)
    return like_host(copy, tensor.host)


def copy_what_leaves(result: object, slots: DeviceSlots, closing: Callable[[OffloadUnit], bool]) -> object:
    """Returns what a forward returned, tensors in a slot of a unit that is `closing` replaced by copies.

    A module may return its own parameter or buffer, or a view of one (a table of positions, say). Gradients flow
    through the copies.
    """

    def leaves(leaf: object) -> bool:
        slot = slots.slot_of(leaf) if isinstance(leaf, torch.Tensor) else None
        return slot is not None and slot.content is not None and closing(slot.content)

    if isinstance(result, torch.Tensor):
        return result.clone() if leaves(result) else result
    if isinstance(result, (tuple, list, dict)) and any(map(leaves, tree_leaves(result))):
        return tree_map(lambda leaf: leaf.clone() if leaves(leaf) else leaf, result)
    return result


class _OnDevice(torch.autograd.Function):
    """Joins a stand-in to its host parameter in autograd's graph, so that the parameter's gradients can be asked for.

    Its backward gets the sum of the gradients of all uses on the device, as the leaf of a resident parameter would.
    """

    @staticmethod
    def forward(ctx, host: nn.Parameter, view: torch.Tensor, land: Callable) -> torch.Tensor:
        ctx.land = land
        # Not the input itself, which autograd would take for a view of it.
        return view.detach()

    @staticmethod
    @left_out_of_graphs
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        with torch.no_grad():
            return ctx.land(gradient, ctx.next_functions[0][0]), None, None


class _Share(torch.autograd.Function):
    """The identity, whose backward runs when the gradients of all uses of its result are summed."""

    @staticmethod
    def forward(ctx, parameter: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return memory.detach()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return gradient, None


def _stand_in(unit: OffloadUnit, tensor: UnitTensor, slot: DeviceSlot, sink: GradientSink) -> torch.Tensor:
    with torch.inference_mode(False):
        # `.data` has a version counter of its own, which shows whether forward changed a buffer.
        views = [view.data for view in tensor.views_of(slot.bytes)]
        if tensor.is_buffer:
            tensor.device = view = over(tensor.host, views)
            if any(may_change((attribute.module, attribute.name)) for attribute in tensor.attributes):
                # Autograd would save a view of the slot by name, and find there what later forwards make of it.
                tensor.own_copy = view.clone()
        elif tensor.trains:
            tensor.device = _joined(unit, tensor, views[0], sink)
        else:
            tensor.device = _frozen(tensor.host, views)
        tensor.device_version += tensor.new_writes
        tensor.device.__dict__.pop(_DATA_TAKEN, None)
    return tensor.device if tensor.own_copy is None else tensor.own_copy


def _frozen(host: nn.Parameter, memory: list[torch.Tensor]) -> torch.Tensor:
    """Returns a frozen parameter like `host` over `memory`, a tensor for each of its parts."""
    if wraps(host):
        return over(host, memory)
    stand_in = like_host(nn.Parameter(memory[0], requires_grad=False), host)
    state = state_of(host)
    if state is not None:
        stand_in.__dict__[STATE] = replaced_in(state, memory[1:])
    return stand_in


def _joined(unit: OffloadUnit, tensor: UnitTensor, view: torch.Tensor, sink: GradientSink) -> torch.Tensor:
    """Returns the stand-in of a parameter that trains, with `view` as its data: one a step.

    Autograd then sums the gradients of all its uses before they leave, as it would for a resident parameter. Where
    microbatches run side by side, each has its share of the stand-in, which sums the gradients of its uses first.
    """
    if tensor.joined is None:
        tensor.joined = _join(unit, tensor, view, sink)
    tensor.joined.data = view
    microbatch = running_microbatch()
    if microbatch is None:
        return tensor.joined
    if microbatch not in tensor.shares:
        tensor.shares[microbatch] = like_host(share_of(tensor.joined, view), tensor.host)
    tensor.shares[microbatch].data = view
    return tensor.shares[microbatch]


def share_of(parameter: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over `memory`, a detached `parameter`, that sums the gradients of its uses for `parameter`."""
    with torch.enable_grad():
        share = _Share.apply(parameter, memory)
    set_sequence_number(share.grad_fn, AT_ONCE)
    return share


def _join(unit: OffloadUnit, tensor: UnitTensor, view: torch.Tensor, sink: GradientSink) -> torch.Tensor:
    with torch.enable_grad():
        joined = _OnDevice.apply(tensor.host, view, functools.partial(sink.land, unit, tensor))
    ((accumulate, _), *_) = joined.grad_fn.next_functions

    def before_host_gradient(gradients: tuple[torch.Tensor | None, ...]) -> None:
        if gradients[0] is not None:
            sink.before_host_gradient(unit, tensor)

    accumulate.register_prehook(before_host_gradient)
    # Run as soon as it is ready, as autograd runs what accumulates gradients.
    set_sequence_number(joined.grad_fn, AT_ONCE)
    return like_host(joined, tensor.host)


def like_host(stand_in: torch.Tensor, host: nn.Parameter) -> torch.Tensor:
    """Gives a stand-in the class and the Python attributes of the parameter, for which its module may ask."""
    stand_in.__class__ = _noting_data(type(host))
    stand_in.__dict__.update(host.__dict__)
    return stand_in


@functools.cache
def _noting_data(kind: type) -> type:
    """Returns a subclass of the same name whose tensors note that their `data` was asked for, to be written perhaps."""
    data = inspect.getattr_static(kind, "data")

    def take(self: torch.Tensor) -> torch.Tensor:
        self.__dict__[_DATA_TAKEN] = True
        return data.__get__(self)

    return type(kind)(
        kind.__name__,
        (kind,),
        {"data": property(take, data.__set__), "__module__": kind.__module__, "__qualname__": kind.__qualname__},
    )


def data_was_taken(stand_in: torch.Tensor) -> bool:
    """Tells whether code has asked for the `data` of a stand-in, through which writes raise no version counter."""
    return _DATA_TAKEN in stand_in.__dict__


def _take_replacement(tensor: UnitTensor, attribute: ModuleAttribute) -> bool:
    """Takes over a tensor that forward assigned in place of a stand-in. Returns False where its module keeps it."""
    new = attribute.tensor
    if new is not None and tensor.layout.fits(new):
        with torch.no_grad():
            tensor.device.copy_(new)
        tensor.own_copy = None
        return True
    if new is not None:
        attribute.assign(new.to(tensor.host.device))
    return False


def _put_back(tensor: UnitTensor, attribute: ModuleAttribute, there: torch.Tensor, own: torch.Tensor) -> None:
    current = attribute.tensor
    if current is there and tensor.is_buffer:
        with torch.no_grad():
            own.copy_(there)
    attribute.assign(own if current is there or current is None else current.to(own.device))


def _is_stand_in(held: torch.Tensor | None, stand_in: torch.Tensor, slot: DeviceSlot) -> bool:
    """Tells whether a module holds its stand-in, or another parameter that forward has made of its memory."""
    if held is stand_in or not isinstance(held, nn.Parameter):
        return held is stand_in
    here = storage_address(slot.bytes.untyped_storage())
    return all(storage_address(part.untyped_storage()) == here for part in parts(held))


def _may_have_changed(tensor: UnitTensor) -> bool:
    held = tensor.device if tensor.own_copy is None else tensor.own_copy
    writes = version(tensor.own_copy)
    tensor.writes += writes
    return (
        tensor.count_writes()
        or writes > 0
        or any(changes_unseen(held, attribute.module.training) for attribute in tensor.attributes)
    )


def _was_changed(tensor: UnitTensor, slot: DeviceSlot) -> bool:
    """Tells whether a forward changed a parameter: in place, or by giving it other data, which goes into the slot."""
    device, there = tensor.device, slot.bytes.untyped_storage().data_ptr()
    if any(part.untyped_storage().data_ptr() != there for part in tensor.parts_of(device)):
        if not tensor.layout.fits(device):
            raise RuntimeError(
                f"{tensor.name} was {tensor.dtype} of shape {tuple(tensor.shape)}, and its forward made it"
                f" {device.dtype} of shape {tuple(device.shape)}: a parameter that streams keeps dtype and shape"
            )
        views = [view.data for view in tensor.views_of(slot.bytes)]
        with torch.no_grad():
            for view, part in zip(views, tensor.parts_of(device), strict=True):
                view.copy_(part.data)
        tensor.device = give_memory(device, views, ())
        tensor.writes += 1
        return True
    # A write through `.data` does not count for autograd. Quantised weights are read so, and not written.
    return tensor.count_writes() or (data_was_taken(device) and not tensor.layout.is_compound)
