"""Device stand-ins of a unit's parameters and buffers, which modules hold inside a window; shares of what stays.

One microbatch after another, autograd sums the gradients of all uses of a parameter in a microbatch, and adds the sum
to the parameter's gradient. Side by side it would sum all uses of all microbatches, in another order. So in the turns
of a microbatch modules hold its own share of each parameter: the same memory, with a node of its own in autograd's
graph, which sums its uses (`StandIn.shares`, `ResidentShares`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from offload.memory.device_slots import DeviceSlot
from offload.torch_private.buffer_states import changes_unseen, may_change, version
from offload.torch_private.module_contexts import SideBySideError, running_microbatch
from offload.torch_private.recomputed_blocks import STANDS_FOR
from offload.torch_private.tensor_parts import STATE, lies_flat, parts, replaced_in, state_of, wraps
from offload.torch_private.torch_internals import NO_CONTEXT, set_sequence_number, storage_address
from offload.weights.gradients.landing import GradientLanding
from offload.weights.units.placement import ModuleAttribute, give_memory, over
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.user_changes import is_gone
from offload.weights.windows.stand_in import (
    AT_ONCE,
    DATA_TAKEN,
    OnDevice,
    StandIn,
    forget_data_taken,
    joined_to_host,
    like_host,
    share_of,
)


def install_stand_ins(
    unit: OffloadUnit,
    stand_ins: Iterable[StandIn],
    slot: DeviceSlot,
    sink: GradientLanding,
    units: Sequence[OffloadUnit],
) -> None:
    """Makes modules hold the tensors of `unit` as views of `slot`, by its `stand_ins`.

    What a module holds in place of the host's tensor is its user's own (`torch.func.functional_call`, a buffer of
    another shape): it is left, or goes to the device meanwhile. Raises SideBySideError for such a parameter where
    microbatches run side by side, and RuntimeError for one that its module has no more. `units` are all that have
    homes. `sink` gets the gradient of a parameter when autograd has summed it.
    """
    microbatch = running_microbatch()
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else NO_CONTEXT:
        for stand_in in stand_ins:
            tensor, made = stand_in.tensor, None
            for attribute in tensor.attributes:
                # `attribute.tensor` and `attribute.assign`, without the calls: most windows are opened here.
                held = attribute.module._buffers if tensor.is_buffer else attribute.module._parameters
                if held.get(attribute.name) is tensor.host and not attribute.is_recurrent:
                    if made is None:
                        made = _stand_in(unit, stand_in, slot, sink, microbatch)
                    held[attribute.name] = made
                elif attribute.tensor is tensor.host:
                    made = made if made is not None else _stand_in(unit, stand_in, slot, sink, microbatch)
                    attribute.assign(made)
                else:
                    _install_own(stand_in, attribute, slot, units)
                    continue
                stand_in.installed.append((attribute, made, None))


def _install_own(stand_in: StandIn, attribute: ModuleAttribute, slot: DeviceSlot, units: Sequence[OffloadUnit]) -> None:
    """Brings what a module holds in place of the host's tensor to the device, if it is not there."""
    tensor, current = stand_in.tensor, attribute.tensor
    if running_microbatch() is not None and not tensor.is_buffer:
        raise SideBySideError(f"{tensor.name} is replaced (torch.func.functional_call)")
    if current is None and not tensor.is_buffer and attribute.name not in attribute.tensors:
        raise is_gone(tensor)
    if current is None or current.device.type != "cpu":
        return
    # Where the CPU is the device, what is elsewhere is memory at home.
    device, homes = slot.bytes.device, (unit.weights.bytes for unit in units)
    if device != current.device or any(0 <= current.data_ptr() - home.data_ptr() < home.numel() for home in homes):
        own = current.to(device, copy=True)
        attribute.assign(own)
        stand_in.installed.append((attribute, own, current))


def remove_stand_ins(stand_ins: Iterable[StandIn], slot: DeviceSlot) -> list[StandIn]:
    """Makes modules hold the host tensors. Returns the stand-ins that forward may have changed in the slot."""
    changed = []
    for stand_in in stand_ins:
        tensor = stand_in.tensor
        for attribute, made, own in stand_in.installed:
            held = attribute.module._buffers if tensor.is_buffer else attribute.module._parameters
            is_held = own is None and held.get(attribute.name) is made
            if is_held and not attribute.is_recurrent and made.shape == tensor.shape:
                held[attribute.name] = tensor.host
            else:
                _take_out(stand_in, attribute, slot, made, own)
        if stand_in.device is not None and stand_in.installed and _has_changed(stand_in, slot):
            changed.append(stand_in)
            if stand_in.own_copy is not None:
                for target, source in zip(parts(stand_in.device), parts(stand_in.own_copy), strict=True):
                    target.data.copy_(source)
        stand_in.own_copy = None
        stand_in.installed.clear()
    return changed


def _take_out(
    stand_in: StandIn, attribute: ModuleAttribute, slot: DeviceSlot, made: torch.Tensor, own: torch.Tensor | None
) -> None:
    """Takes what a module holds now out of the window, where that is not simply the stand-in."""
    tensor, held = stand_in.tensor, attribute.tensor
    if own is not None:
        if held is made and tensor.is_buffer:
            with torch.no_grad():
                own.copy_(made)
        attribute.assign(own if held is made or held is None else held.to(own.device))
    elif made.shape != tensor.shape and held is made:
        # A buffer that forward has resized. Its module keeps it.
        attribute.assign(made.to(tensor.host.device))
        stand_in.own_copy = None
    elif held is made or _is_in_slot(held, slot) or (tensor.is_buffer and _take_replacement(stand_in, attribute)):
        attribute.assign(tensor.host)


def forget_stand_ins(stand_ins: Iterable[StandIn]) -> None:
    """Forgets those of earlier steps, too: gradients of their parameters go nowhere from now on."""
    for stand_in in stand_ins:
        stand_in.device = stand_in.joined = stand_in.joined_before = None
        stand_in.shares.clear()


def frozen_stand_in(stand_in: StandIn, slot: DeviceSlot) -> torch.Tensor:
    """Returns the stand-in of a frozen parameter that consists of several tensors: one for each slot."""
    # To make one runs much code of its class.
    made = stand_in.kept_for(slot)
    if made is None:
        made = _frozen(stand_in.tensor.host, [view.data for view in stand_in.views_in(slot)])
        stand_in.keep_for(slot, made)
    return made


def copy_of_frozen(stand_in: StandIn, slot: DeviceSlot) -> torch.Tensor:
    """Returns such a stand-in that needs no slot."""
    return _frozen(stand_in.tensor.host, [view.data.clone() for view in stand_in.views_in(slot)])


def differs_from_home(stand_in: StandIn) -> bool:
    """Tells whether a parameter has other values on the device than at home. Blocks the host until it knows."""
    # In a dry run there are no values.
    tensor = stand_in.tensor
    if tensor.is_buffer or tensor.layout.is_compound or tensor.host.is_meta:
        return False
    here = stand_in.device.detach()
    return not torch.equal(here, torch.empty_like(here).copy_(tensor.host.detach()))


def drop_stand_ins(stand_ins: Iterable[StandIn]) -> None:
    """Ends the use of stand-ins, for this step; those of parameters that train may serve the next."""
    for stand_in in stand_ins:
        stand_in.device = None
        if stand_in.joined is not None:
            stand_in.joined_before, stand_in.joined = stand_in.joined, None
            stand_in.shares.clear()
        # What forward changed on the device has changed at home.
        for _ in range(stand_in.writes):
            torch.autograd.graph.increment_version(stand_in.tensor.host)
        stand_in.writes = 0


def copy_of_stand_in(unit: OffloadUnit, stand_in: StandIn, slot: DeviceSlot, sink: GradientLanding) -> torch.Tensor:
    """Returns a copy of the stand-in, which needs no slot. For autograd it is a use of the stand-in."""
    # A tensor of inference mode would have no version counter, which shows whether code has written to it.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else NO_CONTEXT:
        tensor = stand_in.tensor
        views = [view.data for view in tensor.views_of(slot.bytes)]
        if not tensor.trains:
            copies = [view.clone() for view in views]
            return over(tensor.host, copies) if tensor.is_buffer else _frozen(tensor.host, copies)
        copy = _joined(unit, stand_in, views[0], sink, running_microbatch()).clone()
        if copy.grad_fn is not None:
            # Its gradient is added to those of other uses when it is made, as without the copy.
            set_sequence_number(copy.grad_fn, AT_ONCE)
        return like_host(copy, tensor.host)


def _stand_in(
    unit: OffloadUnit, stand_in: StandIn, slot: DeviceSlot, sink: GradientLanding, microbatch: int | None
) -> torch.Tensor:
    tensor, views = stand_in.tensor, stand_in.slot_views.get(slot.index) or stand_in.views_in(slot)
    if not (tensor.is_buffer or tensor.layout.is_compound):
        made = stand_in.joined
        trains = tensor.host.requires_grad
        if made is None or microbatch is not None or made.requires_grad != trains:
            made = _joined(unit, stand_in, views[0], sink, microbatch)
        else:
            object.__setattr__(made, "data", views[0])
        stand_in.device, stand_in.counted_version = made, made._version
        made.__dict__.pop(DATA_TAKEN, None)
        if tensor.host.__dict__:
            forget_data_taken(made)
        return made
    if tensor.is_buffer:
        # `.data` has a version counter of its own, which shows whether forward changed a buffer.
        stand_in.device = view = over(tensor.host, [view.data for view in views])
        if any(may_change((attribute.module, attribute.name)) for attribute in tensor.attributes):
            # Autograd would save a view of the slot by name, and find there what later forwards make of it.
            stand_in.own_copy = view.clone()
    else:
        # Without the stand-in of another slot, the parts of the kept one count as those of `device`.
        stand_in.device = None
        stand_in.device = frozen_stand_in(stand_in, slot)
    stand_in.counted_version = stand_in.version
    forget_data_taken(stand_in.device)
    return stand_in.device if stand_in.own_copy is None else stand_in.own_copy


def _frozen(host: nn.Parameter, memory: list[torch.Tensor]) -> torch.Tensor:
    """Returns a frozen parameter like `host` over `memory`, a tensor for each of its parts."""
    if wraps(host):
        made = over(host, memory)
        made.__dict__[STANDS_FOR] = host
        return made
    made = like_host(nn.Parameter(memory[0], requires_grad=False), host)
    state = state_of(host)
    if state is not None:
        made.__dict__[STATE] = replaced_in(state, memory[1:])
    return made


def _joined(
    unit: OffloadUnit, stand_in: StandIn, view: torch.Tensor, sink: GradientLanding, microbatch: int | None
) -> torch.Tensor:
    """Returns the stand-in of a parameter, with `view` as its data: one a step, and the same in the next.

    So autograd sums the gradients of all uses before they leave; side by side, each microbatch's in its share first.
    """
    joined, host = stand_in.joined, stand_in.tensor.host
    if joined is not None and joined.requires_grad and not host.requires_grad:
        # Frozen for a forward of this step.
        return like_host(nn.Parameter(view.data, requires_grad=False), host)
    if joined is None or joined.requires_grad != host.requires_grad:
        joined, stand_in.joined_before = stand_in.joined_before, None
        # Its user may have replaced the parameter, or frozen it; an operation in place has given it another node.
        is_joined = joined is not None and type(joined.grad_fn) is OnDevice._backward_cls
        if joined is not None and joined.__dict__[STANDS_FOR] is host and host.requires_grad == is_joined:
            joined.__dict__.clear()
        elif host.requires_grad:
            joined = joined_to_host(unit, stand_in.tensor, view, sink)
        else:
            joined = nn.Parameter(view.data, requires_grad=False)
        stand_in.joined = like_host(joined, host)
    # Without the look at names that an assignment to a stand-in takes.
    object.__setattr__(joined, "data", view)
    if microbatch is None or not host.requires_grad:
        return joined
    if microbatch not in stand_in.shares:
        stand_in.shares[microbatch] = like_host(share_of(joined, view.data), host)
    object.__setattr__(stand_in.shares[microbatch], "data", view)
    return stand_in.shares[microbatch]


def _take_replacement(stand_in: StandIn, attribute: ModuleAttribute) -> bool:
    """Takes over a tensor that forward assigned in place of a stand-in. Returns False where its module keeps it."""
    tensor, new = stand_in.tensor, attribute.tensor
    if new is not None and tensor.layout.fits(new):
        with torch.no_grad():
            stand_in.device.copy_(new)
        stand_in.own_copy = None
        return True
    if new is not None:
        attribute.assign(new.to(tensor.host.device))
    return False


def _is_in_slot(held: torch.Tensor | None, slot: DeviceSlot) -> bool:
    """Tells whether a module holds another parameter that forward has made of the memory of its stand-in."""
    if not isinstance(held, nn.Parameter):
        return False
    here = storage_address(slot.bytes.untyped_storage())
    return all(storage_address(part.untyped_storage()) == here for part in parts(held))


def _has_changed(stand_in: StandIn, slot: DeviceSlot) -> bool:
    """Tells whether a forward may have changed a tensor in `slot`: in place, or by giving it other data."""
    tensor, device = stand_in.tensor, stand_in.device
    if tensor.is_buffer:
        held = device if stand_in.own_copy is None else stand_in.own_copy
        writes = version(stand_in.own_copy)
        stand_in.writes += writes
        unseen = any(changes_unseen(held, attribute.module.training) for attribute in tensor.attributes)
        return stand_in.count_writes() or writes > 0 or unseen
    if tensor.layout.is_compound:
        there = slot.bytes.untyped_storage().data_ptr()
        # The forward may have given it other parts. Quantised weights are read through `.data`, and not written so.
        if any(part.untyped_storage().data_ptr() != there for part in stand_in.look_at_parts()):
            return _take_data(stand_in, slot)
        return stand_in.count_writes()
    (view,) = stand_in.slot_views[slot.index]
    if device.data_ptr() != view.data_ptr() or device.stride() != tensor.strides:
        # Other memory, or the same in another order, as `weight.data.t()` is.
        return _take_data(stand_in, slot)
    # A write through `.data` does not count for autograd.
    data_taken = DATA_TAKEN in device.__dict__
    if data_taken and running_microbatch() is not None:
        # Whether it was a write matters to a trial, which refuses writes.
        stand_in.writes += differs_from_home(stand_in)
    return (device._version != stand_in.counted_version and stand_in.count_writes()) or data_taken


def _take_data(stand_in: StandIn, slot: DeviceSlot) -> bool:
    """Takes over the data that a forward has given a parameter. Returns True: it has changed."""
    tensor, device = stand_in.tensor, stand_in.device
    if not tensor.layout.fits(device):
        raise RuntimeError(
            f"{tensor.name} was {tensor.dtype} of shape {tuple(tensor.shape)}, and its forward made it"
            f" {device.dtype} of shape {tuple(device.shape)}: a parameter that streams keeps dtype and shape:"
            " convert it before the mode attaches"
        )
    views = [view.data for view in tensor.views_of(slot.bytes)]
    with torch.no_grad():
        for view, part in zip(views, stand_in.parts, strict=True):
            # A copy of it: it may lie in the slot, in another order.
            view.copy_(part.data.clone())
    stand_in.device = give_memory(device, views, ())
    stand_in.writes += 1
    return True


class ResidentShares:
    """The shares of microbatches in the resident parameters, which the given attributes hold."""

    def __init__(self, resident: Iterable[tuple[torch.Tensor, list[ModuleAttribute]]]):
        self._attributes = [
            attribute for _, attributes in resident for attribute in attributes if not attribute.is_buffer
        ]
        # By microbatch and parameter.
        self._shares: dict[tuple[int, nn.Parameter], torch.Tensor] = {}
        self._held: dict[ModuleAttribute, torch.Tensor | None] = {}

    def begin(self) -> None:
        """Begins turns, in which modules hold the parameters that they hold now."""
        self._held = {attribute: attribute.tensor for attribute in self._attributes}

    @contextmanager
    def turn(self, microbatch: int) -> Iterator[None]:
        """Makes modules hold the shares of `microbatch` for the length of the block.

        Raises SideBySideError, once, if a microbatch has replaced one of the parameters.
        """
        for attribute, held in self._held.items():
            if attribute.tensor is not held:
                # The other microbatches still have turns, in which they end.
                self._held = {}
                what = f"{attribute.name} of a {type(attribute.module).__name__}"
                raise SideBySideError(f"{what} is replaced (torch.func.functional_call)")
        installed = []
        for attribute in self._attributes:
            parameter = attribute.tensor
            # Not a tensor of another class that acts as a parameter, or a sparse one: it may have no memory of its own.
            if issubclass(type(parameter), nn.Parameter) and parameter.requires_grad and lies_flat(parameter):
                share = self._share(microbatch, parameter)
                attribute.assign(share)
                installed.append((attribute, share, parameter))
        try:
            yield
        finally:
            for attribute, share, parameter in installed:
                if attribute.tensor is share:
                    attribute.assign(parameter)
                if share.data_ptr() != parameter.data_ptr():
                    # Forward has given it other data.
                    parameter.data = share.data

    def drop(self) -> None:
        """Forgets the shares: the next microbatches get new ones."""
        self._shares.clear()
        self._held = {}

    def _share(self, microbatch: int, parameter: nn.Parameter) -> torch.Tensor:
        share = self._shares.get((microbatch, parameter))
        if share is None:
            # Detached, it has the parameter's version counter.
            share = like_host(share_of(parameter, parameter.detach()), parameter)
            self._shares[microbatch, parameter] = share
        return share
