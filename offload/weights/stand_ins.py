"""Device stand-ins of a unit's parameters and buffers: the tensors that modules hold inside a window."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from offload.runtime.device_slots import DeviceSlot, DeviceSlots
from offload.runtime.torch_internals import set_sequence_number, tree_leaves, tree_map
from offload.weights.units import ModuleAttribute, OffloadUnit, UnitTensor

# Called with the unit, the tensor, the gradient on the device, and the autograd node that accumulates it into the host
# parameter. Returns what that node gets: a gradient in host memory, or None.
Land = Callable[[OffloadUnit, UnitTensor, torch.Tensor, torch.autograd.graph.Node], torch.Tensor | None]
# Nodes of this number or a higher one are not put in another order by microbatches side by side.
AT_ONCE = 2**63


def install_stand_ins(unit: OffloadUnit, slot: DeviceSlot, land: Land) -> None:
    """Makes modules hold the unit's tensors as views of `slot`.

    Where a module holds another tensor than the host's, that is its user's own (`torch.func.functional_call`, a buffer
    of another shape) and takes part in the forward: it is left, or goes to the device, through autograd, for as long.
    `land` is called when autograd has summed the gradient of a parameter.
    """
    for tensor in unit.tensors:
        stand_in = None
        for attribute in tensor.attributes:
            current = attribute.tensor
            if current is tensor.host:
                stand_in = stand_in if stand_in is not None else _stand_in(unit, tensor, slot, land)
                attribute.assign(stand_in)
                tensor.installed.append((attribute, stand_in, None))
            elif current is not None and current.device != slot.bytes.device and current.device.type == "cpu":
                own = current.to(slot.bytes.device)
                attribute.assign(own)
                tensor.installed.append((attribute, own, current))


def remove_stand_ins(unit: OffloadUnit) -> list[UnitTensor]:
    """Makes modules hold the unit's host tensors. Returns the buffers that forward may have changed in the slot."""
    changed = []
    for tensor in unit.tensors:
        for attribute, stand_in, own in tensor.installed:
            if own is not None:
                _put_back(tensor, attribute, stand_in, own)
            elif attribute.tensor is stand_in or (tensor.is_buffer and _take_replacement(tensor, attribute)):
                attribute.assign(tensor.host)
        if tensor.is_buffer and tensor.device is not None and tensor.installed and _may_have_changed(tensor):
            changed.append(tensor)
        tensor.installed.clear()
    return changed


def drop_stand_ins(unit: OffloadUnit) -> None:
    """Forgets the unit's stand-ins: the next window makes new ones."""
    for tensor in unit.tensors:
        tensor.device = tensor.joined = None


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
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        with torch.no_grad():
            return ctx.land(gradient, ctx.next_functions[0][0]), None, None


def _stand_in(unit: OffloadUnit, tensor: UnitTensor, slot: DeviceSlot, land: Land) -> torch.Tensor:
    with torch.inference_mode(False):
        # `.data` has a version counter of its own, which shows whether forward changed a buffer.
        view = tensor.view_of(slot.bytes).data
        if tensor.is_buffer:
            tensor.device = view
        elif tensor.trains:
            tensor.device = _joined(unit, tensor, view, land)
        else:
            tensor.device = _like_host(nn.Parameter(view, requires_grad=False), tensor.host)
    return tensor.device


def _joined(unit: OffloadUnit, tensor: UnitTensor, view: torch.Tensor, land: Land) -> torch.Tensor:
    """Returns the stand-in of a parameter that trains, with `view` as its data: one a step.

    Autograd then sums the gradients of all its uses before they leave, as it would for a resident parameter.
    """
    if tensor.joined is not None:
        tensor.joined.data = view
        return tensor.joined
    with torch.enable_grad():
        joined = _OnDevice.apply(tensor.host, view, functools.partial(land, unit, tensor))
    # Run as soon as it is ready, as autograd runs what accumulates gradients.
    set_sequence_number(joined.grad_fn, AT_ONCE)
    tensor.joined = _like_host(joined, tensor.host)
    return tensor.joined


def _like_host(stand_in: torch.Tensor, host: nn.Parameter) -> torch.Tensor:
    """Gives a stand-in the class and the Python attributes of the parameter, for which its module may ask."""
    stand_in.__class__ = type(host)
    stand_in.__dict__.update(host.__dict__)
    return stand_in


def _take_replacement(tensor: UnitTensor, attribute: ModuleAttribute) -> bool:
    """Takes over a tensor that forward assigned in place of a stand-in. Returns False where its module keeps it."""
    new = attribute.tensor
    if new is not None and (new.shape, new.dtype) == (tensor.shape, tensor.dtype):
        with torch.no_grad():
            tensor.device.copy_(new)
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


def _may_have_changed(tensor: UnitTensor) -> bool:
    # In training a buffer may be written in ways that raise no version counter: by kernels of running statistics, and
    # through `.data` or NumPy, as codebooks are. Quantised weights, a byte an element or less, are not.
    learns = tensor.dtype.itemsize > 1 and any(attribute.module.training for attribute in tensor.attributes)
    return learns or tensor.device._version > 0
