"""Device stand-ins of a unit's parameters and buffers: the tensors that modules hold inside a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from offload.memory.device_slots import DeviceSlot
from offload.torch_private.block_attributes import STANDS_FOR
from offload.torch_private.buffer_states import changes_unseen, may_change, may_write_unseen, version
from offload.torch_private.running_microbatch import SideBySideError, running_microbatch
from offload.torch_private.tensor_parts import STATE, parts, replaced_in, state_of, wraps
from offload.torch_private.torch_internals import (
    AS_IT_IS,
    gradient_hooks,
    set_sequence_number,
    storage_address,
)
from offload.weights.units.layouts import over
from offload.weights.units.placement import ModuleAttribute, give_memory
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor
from offload.weights.windows.gradient_nodes import (
    AT_ONCE,
    GradientSink,
    OnDevice,
    before_reads,
    joined_to_host,
    share_of,
)
from offload.weights.windows.stand_in_class import class_like, data_was_taken, forget_data_taken, give_data, like_host


def install_stand_ins(
    unit: OffloadUnit, slot: DeviceSlot, sink: GradientSink, units: Sequence[OffloadUnit] = ()
) -> None:
    """Makes modules hold the unit's tensors as views of `slot`.

    Where a module holds another tensor than the host's, that is its user's own (`torch.func.functional_call`, a buffer
    of another shape) and takes part in the forward: it is left, or goes to the device, through autograd, for as long.
    Raises SideBySideError for a parameter where microbatches run side by side, which would use each other's, and
    RuntimeError in one line for one that its module has no more.
    `units` are all that have homes. `sink` gets the gradient of a parameter when autograd has summed it.
    """
    device, before_read = slot.bytes.device, before_reads(sink)
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else AS_IT_IS:
        for tensor in unit.tensors:
            stand_in = None
            for attribute in tensor.attributes:
                current = attribute.tensor
                if current is tensor.host:
                    stand_in = stand_in if stand_in is not None else _stand_in(unit, tensor, slot, sink, before_read)
                    attribute.assign(stand_in)
                    tensor.installed.append((attribute, stand_in, None))
                elif running_microbatch() is not None and not tensor.is_buffer:
                    raise SideBySideError(f"{tensor.name} is replaced (torch.func.functional_call)")
                elif current is None and not tensor.is_buffer and attribute.name not in attribute.tensors:
                    raise tensor.is_gone()
                elif current is not None and current.device.type == "cpu" and _is_elsewhere(current, units, device):
                    own = current.to(device, copy=True)
                    attribute.assign(own)
                    tensor.installed.append((attribute, own, current))


def remove_stand_ins(unit: OffloadUnit, slot: DeviceSlot) -> list[UnitTensor]:
    """Makes modules hold the unit's host tensors. Returns those that forward may have changed in the slot."""
    changed, there = [], slot.bytes.untyped_storage().data_ptr()
    for tensor in unit.tensors:
        for attribute, stand_in, own in tensor.installed:
            if own is not None:
                _put_back(tensor, attribute, stand_in, own)
            elif stand_in.shape != tensor.shape and attribute.tensor is stand_in:
                # A buffer that forward has resized. Its module keeps it.
                attribute.assign(stand_in.to(tensor.host.device))
                tensor.own_copy = None
            elif (
                (held := attribute.tensor) is stand_in
                or _is_in_slot(held, slot)
                or (tensor.is_buffer and _take_replacement(tensor, attribute))
            ):
                attribute.assign(tensor.host)
        if tensor.device is not None and tensor.installed:
            may_have_changed = _may_have_changed(tensor) if tensor.is_buffer else _was_changed(tensor, slot, there)
            if may_have_changed:
                changed.append(tensor)
                if tensor.own_copy is not None:
                    for target, source in zip(parts(tensor.device), parts(tensor.own_copy), strict=True):
                        target.data.copy_(source)
        tensor.own_copy = None
        tensor.installed.clear()
    return changed


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
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else AS_IT_IS:
        views = [view.data for view in tensor.views_of(slot.bytes)]
        if not tensor.trains:
            copies = [view.clone() for view in views]
            return over(tensor.host, copies) if tensor.is_buffer else _frozen(tensor.host, copies)
        before_read = before_reads(sink)
        copy = _joined(unit, tensor, views[0], sink, before_read).clone()
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
    unit: OffloadUnit, tensor: UnitTensor, slot: DeviceSlot, sink: GradientSink, before_read: Callable[[], None]
) -> torch.Tensor:
    if tensor.is_buffer:
        # `.data` has a version counter of its own, which shows whether forward changed a buffer.
        tensor.device = view = over(tensor.host, [view.data for view in tensor.views_in(slot)])
        if any(may_change((attribute.module, attribute.name)) for attribute in tensor.attributes):
            # Autograd would save a view of the slot by name, and find there what later forwards make of it.
            tensor.own_copy = view.clone()
    elif tensor.host.requires_grad:
        tensor.device = _joined(unit, tensor, tensor.views_in(slot)[0], sink, before_read)
    elif not tensor.layout.is_compound:
        tensor.device = _frozen(tensor.host, [view.data for view in tensor.views_in(slot)])
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
    unit: OffloadUnit, tensor: UnitTensor, view: torch.Tensor, sink: GradientSink, before_read: Callable[[], None]
) -> torch.Tensor:
    """Returns the stand-in of a parameter that trains, with `view` as its data: one a step, and the same in the next.

    Autograd then sums the gradients of all its uses before they leave, as it would for a resident parameter. Where
    microbatches run side by side, each has its share of the stand-in, which sums the gradients of its uses first.
    """
    # A stand-in without its node was frozen by a forward.
    if tensor.joined is None or tensor.joined.grad_fn is None:
        before, tensor.joined_before = tensor.joined_before, None
        is_alike = before is not None and _serves_again(before, tensor.host)
        joined = before if is_alike else joined_to_host(unit, tensor, view, sink)
        tensor.joined = like_host(joined, tensor.host, before_read)
    give_data(tensor.joined, view)
    microbatch = running_microbatch()
    if microbatch is None:
        return tensor.joined
    if microbatch not in tensor.shares:
        tensor.shares[microbatch] = like_host(share_of(tensor.joined, view.data), tensor.host)
    give_data(tensor.shares[microbatch], view)
    return tensor.shares[microbatch]


def _serves_again(joined: torch.Tensor, host: nn.Parameter) -> bool:
    """Tells whether the stand-in of an earlier step is as one made now, but for attributes, which it gets.

    Its user may have put hooks on it or changed it, or have replaced the parameter.
    """
    node = joined.grad_fn
    if type(node) is not OnDevice._backward_cls or node.accumulates.variable is not host:
        return False
    if any(gradient_hooks(joined)) or joined.retains_grad or type(joined) is not class_like(type(host)):
        return False
    joined.__dict__.clear()
    return True


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


def _may_have_changed(tensor: UnitTensor) -> bool:
    held = tensor.device if tensor.own_copy is None else tensor.own_copy
    writes = version(tensor.own_copy)
    tensor.writes += writes
    return (
        tensor.count_writes()
        or writes > 0
        or any(changes_unseen(held, may_write_unseen(attribute.module)) for attribute in tensor.attributes)
    )


def _was_changed(tensor: UnitTensor, slot: DeviceSlot, there: int) -> bool:
    """Tells whether a forward changed a parameter: in place, or by giving it other data, which goes into the slot.

    `there` is the address of the slot.
    """
    device, is_compound = tensor.device, tensor.layout.is_compound
    data_taken = data_was_taken(device) and not is_compound
    # The forward may have given it other parts.
    for part in tensor.device_parts_now() if is_compound else (device,):
        if part.untyped_storage().data_ptr() != there:
            return _take_data(tensor, slot)
    if not is_compound and device.stride() != tensor.strides:
        # The same memory in another order, as `weight.data.t()` is.
        return _take_data(tensor, slot)
    # A write through `.data` does not count for autograd. Quantised weights are read so, and not written.
    if data_taken and running_microbatch() is not None:
        # Whether it was a write matters to the other microbatches.
        tensor.writes += differs_from_home(tensor)
    return tensor.count_writes() or data_taken


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
