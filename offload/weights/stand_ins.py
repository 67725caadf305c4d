"""Device stand-ins of a unit's parameters and buffers: the tensors that modules hold inside a window."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from offload.runtime.device_slots import DeviceSlot
from offload.runtime.torch_internals import NormWithStatistics, gradient_hooks
from offload.weights.units import OffloadUnit, UnitTensor

Land = Callable[[OffloadUnit, UnitTensor, nn.Parameter], None]


def install_stand_ins(unit: OffloadUnit, slot: DeviceSlot, land: Land) -> None:
    """Makes modules hold the unit's tensors as views of `slot`.

    `land(unit, tensor, leaf)` is called when autograd has accumulated a gradient into the leaf of a parameter.
    """
    for tensor in unit.tensors:
        tensor.install(_stand_in(unit, tensor, slot, land))


def remove_stand_ins(unit: OffloadUnit) -> list[UnitTensor]:
    """Makes modules hold the unit's host tensors. Returns the buffers that forward changed in the slot."""
    changed = [tensor for tensor in unit.tensors if tensor.is_buffer and _has_changed(tensor)]
    for tensor in unit.tensors:
        tensor.install(tensor.host)
    return changed


def drop_stand_ins(unit: OffloadUnit) -> None:
    """Forgets the unit's stand-ins: the next window makes new ones, with new leaves."""
    for tensor in unit.tensors:
        tensor.device = None


def _stand_in(unit: OffloadUnit, tensor: UnitTensor, slot: DeviceSlot, land: Land) -> torch.Tensor:
    with torch.inference_mode(False):
        # `.data` has a version counter of its own, which shows whether forward changed a buffer.
        view = tensor.view_of(slot.bytes).data
        if tensor.is_buffer:
            tensor.device = view
        elif tensor.device is not None:
            # One leaf a step: autograd sums the gradients of all its uses before they leave, as it would for a
            # resident parameter.
            tensor.device.data = view
        else:
            tensor.device = nn.Parameter(view, requires_grad=tensor.trains)
            if tensor.trains:
                for hook in gradient_hooks(tensor.host):
                    tensor.device.register_hook(hook)
                tensor.device.register_post_accumulate_grad_hook(functools.partial(land, unit, tensor))
    return tensor.device


def _has_changed(tensor: UnitTensor) -> bool:
    attribute = tensor.attributes[0]
    replaced = attribute.tensor is not tensor.device
    if replaced:
        tensor.device.copy_(attribute.tensor)
    # Kernels that update running statistics do not raise the version counter.
    counts = isinstance(attribute.module, NormWithStatistics) and attribute.module.training
    return replaced or counts or tensor.device._version > 0
