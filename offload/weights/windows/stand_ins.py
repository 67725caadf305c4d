"""Device stand-ins of a unit's parameters and buffers: the tensors that modules hold inside a window."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from offload.memory.device_slots import DeviceSlot
from offload.torch_private.block_attributes import STANDS_FOR
from offload.torch_private.buffer_states import changes_unseen, may_change, may_write_unseen, version
from offload.torch_private.running_microbatch import SideBySideError, running_microbatch
from offload.torch_private.tensor_parts import STATE, parts, replaced_in, state_of, wraps
from offload.torch_private.torch_internals import NO_CONTEXT, set_sequence_number, storage_address
from offload.weights.units.layouts import over
from offload.weights.units.placement import ModuleAttribute, give_memory
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor
from offload.weights.windows.gradient_nodes import AT_ONCE, GradientSink, OnDevice, joined_to_host, share_of
from offload.weights.windows.stand_in_class import DATA_TAKEN, forget_data_taken, give_data, like_host


def install_stand_ins(unit: OffloadUnit, slot: DeviceSlot, sink: GradientSink, units: Sequence[OffloadUnit]) -> None:
    """Makes modules hold the unit's tensors as views of `slot`.

    Where a module holds another tensor than the host's, that is its user's own (`torch.func.functional_call`, a buffer
    of another shape) and takes part in the forward: it is left, or goes to the device, through autograd, for as long.
    Raises SideBySideError for a parameter where microbatches run side by side, which would use each other's, and
    RuntimeError in one line for one that its module has no more.
    `units` are all that have homes. `sink` gets the gradient of a parameter when autograd has summed it.
    """
    microbatch = running_microbatch()
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else NO_CONTEXT:
        for tensor in unit.tensors:
            host, stand_in = tensor.host, None
            for attribute in tensor.attributes:
                # `attribute.tensor` and `attribute.assign`, without the calls: most windows are opened here.
                held = attribute.module._buffers if tensor.is_buffer else attribute.module._parameters
                if isinstance(held, dict) and held.get(attribute.name) is host and not attribute.is_recurrent:
                    if stand_in is None:
                        stand_in = _stand_in(unit, tensor, slot, sink, microbatch)
                    held[attribute.name] = stand_in
                elif attribute.tensor is host:
                    stand_in = stand_in if stand_in is not None else _stand_in(unit, tensor, slot, sink, microbatch)
                    attribute.assign(stand_in)
                else:
                    _install_own(tensor, attribute, slot, units)
                    continue
                tensor.installed.append((attribute, stand_in, None))


def _install_own(
    tensor: UnitTensor, attribute: ModuleAttribute, slot: DeviceSlot, units: Sequence[OffloadUnit]
) -> None:
    """Brings what a module holds in place of the host's tensor to the device, if it is not there."""
    current = attribute.tensor
    if running_microbatch() is not None and not tensor.is_buffer:
        raise SideBySideError(f"{tensor.name} is replaced (torch.func.functional_call)")
    if current is None and not tensor.is_buffer and attribute.name not in attribute.tensors:
        raise tensor.is_gone()
    if current is not None and current.device.type == "cpu" and _is_elsewhere(current, units, slot.bytes.device):
        own = current.to(slot.bytes.device, copy=True)
        attribute.assign(own)
        tensor.installed.append((attribute, own, current))


def remove_stand_ins(unit: OffloadUnit, slot: DeviceSlot) -> list[UnitTensor]:
    """Makes modules hold the unit's host tensors. Returns those that forward may have changed in the slot."""
    changed = []
    for tensor in unit.tensors:
        for attribute, stand_in, own in tensor.installed:
            held = attribute.module._buffers if tensor.is_buffer else attribute.module._parameters
            is_held = own is None and isinstance(held, dict) and held.get(attribute.name) is stand_in
            if is_held and not attribute.is_recurrent and stand_in.shape == tensor.shape:
                held[attribute.name] = tensor.host
            else:
                _take_out(tensor, attribute, slot, stand_in, own)
        if tensor.device is not None and tensor.installed and _has_changed(tensor, slot):
            changed.append(tensor)
            if tensor.own_copy is not None:
                for target, source in zip(parts(tensor.device), parts(tensor.own_copy), strict=True):
                    target.data.copy_(source)
        tensor.own_copy = None
        tensor.installed.clear()
    return changed


def _take_out(
    tensor: UnitTensor, attribute: ModuleAttribute, slot: DeviceSlot, stand_in: torch.Tensor, own: torch.Tensor | None
) -> None:
    """Takes what a module holds now out of the window, where that is not simply the stand-in."""
    held = attribute.tensor
    if own is not None:
        _put_back(tensor, attribute, stand_in, own)
    elif stand_in.shape != tensor.shape and held is stand_in:
        # A buffer that forward has resized. Its module keeps it.
        attribute.assign(stand_in.to(tensor.host.device))
        tensor.own_copy = None
    elif held is stand_in or _is_in_slot(held, slot) or (tensor.is_buffer and _take_replacement(tensor, attribute)):
        attribute.assign(tensor.host)


def forget_stand_ins(unit: OffloadUnit) -> None:
    """Forgets those of earlier steps, too: gradients of the unit's parameters go nowhere from now on."""
    for tensor in unit.tensors:
        tensor.device = tensor.joined = tensor.joined_before = None
        tensor.shares.clear()


def frozen_stand_in(tensor: UnitTensor, slot: DeviceSlot) -> torch.Tensor:
    """Returns the stand-in of a frozen parameter that consists of several tensors: one for each slot."""
    # To make one runs much code of its class.
    stand_in = tensor.kept_stand_in(slot)
    if stand_in is None:
        stand_in = _frozen(tensor.host, [view.data for view in tensor.views_in(slot)])
        tensor.keep_stand_in(slot, stand_in)
    return stand_in


def copy_of_frozen(tensor: UnitTensor, slot: DeviceSlot) -> torch.Tensor:
    """Returns such a stand-in that needs no slot."""
    return _frozen(tensor.host, [view.data.clone() for view in tensor.views_in(slot)])


def differs_from_home(tensor: UnitTensor) -> bool:
    """Tells whether a parameter has other values on the device than at home. Blocks the host until it knows."""
    # In a dry run there are no values.
    if tensor.is_buffer or tensor.layout.is_compound or tensor.host.is_meta:
        return False
    here = tensor.device.detach()
    return not torch.equal(here, torch.empty_like(here).copy_(tensor.host.detach()))


def drop_stand_ins(unit: OffloadUnit) -> None:
    """Ends the use of the unit's stand-ins, for this step; those of parameters that train may serve the next."""
    for tensor in unit.tensors:
        tensor.device = None
        if tensor.joined is not None:
            tensor.joined_before, tensor.joined = tensor.joined, None
            tensor.shares.clear()
        # What forward changed on the device has changed at home.
        for _ in range(tensor.writes):
            torch.autograd.graph.increment_version(tensor.host)
        tensor.writes = 0


def copy_of_stand_in(unit: OffloadUnit, tensor: UnitTensor, slot: DeviceSlot, sink: GradientSink) -> torch.Tensor:
    """Returns a copy of the stand-in, which needs no slot. For autograd it is a use of the stand-in."""
    # A tensor of inference mode would have no version counter, which shows whether code has written to it.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else NO_CONTEXT:
        views = [view.data for view in tensor.views_of(slot.bytes)]
        if not tensor.trains:
            copies = [view.clone() for view in views]
            return over(tensor.host, copies) if tensor.is_buffer else _frozen(tensor.host, copies)
        copy = _joined(unit, tensor, views[0], sink, running_microbatch()).clone()
        if copy.grad_fn is not None:
            # Its gradient is added to those of other uses when it is made, as without the copy.
            set_sequence_number(copy.grad_fn, AT_ONCE)
        return like_host(copy, tensor.host)


def _is_elsewhere(own: torch.Tensor, units: Sequence[OffloadUnit], device: torch.device) -> bool:
    """Tells whether a tensor of the user's own is not on the device. On the CPU that is memory at home."""
    if own.device != device:
        return True
    homes = (unit.weights.bytes for unit in units)
    return any(0 <= own.data_ptr() - home.data_ptr() < home.numel() for home in homes)


def _stand_in(
    unit: OffloadUnit, tensor: UnitTensor, slot: DeviceSlot, sink: GradientSink, microbatch: int | None
) -> torch.Tensor:
    views = tensor.slot_views.get(slot.index) or tensor.views_in(slot)
    if not (tensor.is_buffer or tensor.layout.is_compound):
        stand_in = tensor.joined
        trains = tensor.host.requires_grad
        if stand_in is None or microbatch is not None or stand_in.requires_grad != trains:
            stand_in = _joined(unit, tensor, views[0], sink, microbatch)
        else:
            object.__setattr__(stand_in, "data", views[0])
        tensor.device, tensor.device_version = stand_in, stand_in._version
        stand_in.__dict__.pop(DATA_TAKEN, None)
        if tensor.host.__dict__:
            forget_data_taken(stand_in)
        return stand_in
    if tensor.is_buffer:
        # `.data` has a version counter of its own, which shows whether forward changed a buffer.
        tensor.device = view = over(tensor.host, [view.data for view in views])
        if any(may_change((attribute.module, attribute.name)) for attribute in tensor.attributes):
            # Autograd would save a view of the slot by name, and find there what later forwards make of it.
            tensor.own_copy = view.clone()
    else:
        # Without the stand-in of another slot, the parts of the kept one count as those of `device`.
        tensor.device = None
        tensor.device = frozen_stand_in(tensor, slot)
    tensor.note_installed()
    forget_data_taken(tensor.device)
    return tensor.device if tensor.own_copy is None else tensor.own_copy


def _frozen(host: nn.Parameter, memory: list[torch.Tensor]) -> torch.Tensor:
    """Returns a frozen parameter like `host` over `memory`, a tensor for each of its parts."""
    if wraps(host):
        stand_in = over(host, memory)
        stand_in.__dict__[STANDS_FOR] = host
        return stand_in
    stand_in = like_host(nn.Parameter(memory[0], requires_grad=False), host)
    state = state_of(host)
    if state is not None:
        stand_in.__dict__[STATE] = replaced_in(state, memory[1:])
    return stand_in


def _joined(
    unit: OffloadUnit, tensor: UnitTensor, view: torch.Tensor, sink: GradientSink, microbatch: int | None
) -> torch.Tensor:
    """Returns the stand-in of a parameter, with `view` as its data: one a step, and the same in the next.

    Autograd then sums the gradients of all its uses before they leave, as it would for a resident parameter. Where
    microbatches run side by side, each has its share of the stand-in, which sums the gradients of its uses first.
    """
    joined, host = tensor.joined, tensor.host
    if joined is not None and joined.requires_grad and not host.requires_grad:
        # Frozen for a forward of this step.
        return like_host(nn.Parameter(view.data, requires_grad=False), host)
    if joined is None or joined.requires_grad != host.requires_grad:
        joined, tensor.joined_before = tensor.joined_before, None
        # Its user may have replaced the parameter, or frozen it; an operation in place has given it another node.
        is_joined = joined is not None and type(joined.grad_fn) is OnDevice._backward_cls
        if joined is not None and joined.__dict__[STANDS_FOR] is host and host.requires_grad == is_joined:
            joined.__dict__.clear()
        elif host.requires_grad:
            joined = joined_to_host(unit, tensor, view, sink)
        else:
            joined = nn.Parameter(view.data, requires_grad=False)
        tensor.joined = like_host(joined, host)
    object.__setattr__(joined, "data", view)
    if microbatch is None or not host.requires_grad:
        return joined
    if microbatch not in tensor.shares:
        tensor.shares[microbatch] = like_host(share_of(joined, view.data), host)
    give_data(tensor.shares[microbatch], view)
    return tensor.shares[microbatch]


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


def _is_in_slot(held: torch.Tensor | None, slot: DeviceSlot) -> bool:
    """Tells whether a module holds another parameter that forward has made of the memory of its stand-in."""
    if not isinstance(held, nn.Parameter):
        return False
    here = storage_address(slot.bytes.untyped_storage())
    return all(storage_address(part.untyped_storage()) == here for part in parts(held))


def _has_changed(tensor: UnitTensor, slot: DeviceSlot) -> bool:
    """Tells whether a forward may have changed a tensor in `slot`: in place, or by giving it other data."""
    device = tensor.device
    if tensor.is_buffer:
        held = device if tensor.own_copy is None else tensor.own_copy
        writes = version(tensor.own_copy)
        tensor.writes += writes
        unseen = any(changes_unseen(held, may_write_unseen(attribute.module)) for attribute in tensor.attributes)
        return tensor.count_writes() or writes > 0 or unseen
    if tensor.layout.is_compound:
        there = slot.bytes.untyped_storage().data_ptr()
        # The forward may have given it other parts. Quantised weights are read through `.data`, and not written so.
        if any(part.untyped_storage().data_ptr() != there for part in tensor.device_parts_now()):
            return _take_data(tensor, slot)
        return tensor.count_writes()
    (view,) = tensor.slot_views[slot.index]
    if device.data_ptr() != view.data_ptr() or device.stride() != tensor.strides:
        # Other memory, or the same in another order, as `weight.data.t()` is.
        return _take_data(tensor, slot)
    # A write through `.data` does not count for autograd.
    data_taken = DATA_TAKEN in device.__dict__
    if data_taken and running_microbatch() is not None:
        # Whether it was a write matters to a trial, which refuses writes.
        tensor.writes += differs_from_home(tensor)
    return (device._version != tensor.device_version and tensor.count_writes()) or data_taken


def _take_data(tensor: UnitTensor, slot: DeviceSlot) -> bool:
    """Takes over the data that a forward has given a parameter. Returns True: it has changed."""
    device = tensor.device
    if not tensor.layout.fits(device):
        raise RuntimeError(
            f"{tensor.name} was {tensor.dtype} of shape {tuple(tensor.shape)}, and its forward made it"
            f" {device.dtype} of shape {tuple(device.shape)}: a parameter that streams keeps dtype and shape:"
            " convert it before the mode attaches"
        )
    views = [view.data for view in tensor.views_of(slot.bytes)]
    with torch.no_grad():
        for view, part in zip(views, tensor.parts_of(device), strict=True):
            # A copy of it: it may lie in the slot, in another order.
            view.copy_(part.data.clone())
    tensor.device = give_memory(device, views, ())
    tensor.writes += 1
    return True
