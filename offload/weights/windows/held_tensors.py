"""The dictionaries in which modules hold their parameters and buffers, and which tell when one is read.

Most weights are read by the forward of the module that holds them, which has a window by then. But any code may read
them: a parent that computes with the weight of a layer that it never calls (Mamba's convolution, DoRA), a user of a
ParameterList, a hook. `module.weight` is a look-up in `module._parameters`, so that is where such a read is noticed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from offload.memory.device_slots import DeviceSlots
from offload.torch_private.module_contexts import OwnHook
from offload.weights.units.unit import OffloadUnit, UnitTensor

# Called with the unit and the tensor that are about to be read. Returns the tensor that the reader gets, or None for
# that which the module holds afterwards.
OnRead = Callable[[OffloadUnit, UnitTensor], torch.Tensor | None]


class HeldTensors(dict):
    """The `_parameters` or `_buffers` of a module: a look-up by name of a tensor that streams calls `on_read` first.

    Iteration does not, so `parameters()` and `state_dict()` see what the module holds. A copy is a plain dictionary.
    `unit` is the unit of all its tensors that stream, None where they have several.
    """

    def __init__(self, held: dict[str, torch.Tensor | None], on_read: OnRead):
        super().__init__(held)
        self._on_read = on_read
        self._streamed: dict[str, tuple[OffloadUnit, UnitTensor]] = {}
        self.unit: OffloadUnit | None = None

    def watch(self, name: str, unit: OffloadUnit, tensor: UnitTensor) -> None:
        """Calls `on_read` for `name` from now on."""
        self.unit = unit if self.unit is unit or not self._streamed else None
        self._streamed[name] = unit, tensor

    def __getitem__(self, name: str) -> torch.Tensor | None:
        streamed = self._streamed.get(name)
        instead = None if streamed is None else self._on_read(*streamed)
        return dict.__getitem__(self, name) if instead is None else instead

    def __deepcopy__(self, memo: dict) -> dict:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple:
        return dict, (dict(self),)


class OpenTensors(HeldTensors):
    """The class of `HeldTensors` while a window is open on their unit: a look-up tells nobody, and costs less."""

    __getitem__ = dict.__getitem__


class LeavesSlots(OwnHook):
    """Gives a state dict that is made inside a forward copies of the tensors of `module` that are in a slot then."""

    def __init__(self, module: nn.Module, slots: DeviceSlots):
        super().__init__(module, module.register_state_dict_post_hook, functools.partial(_copy_out_of_slots, slots))


def _copy_out_of_slots(slots: DeviceSlots, module: nn.Module, state: dict, prefix: str, *_: object) -> None:
    for name in (*module._parameters, *module._buffers):
        tensor = state.get(prefix + name)
        if tensor is not None and slots.slot_of(tensor) is not None:
            state[prefix + name] = tensor.clone()


def watch_reads(
    units: Sequence[OffloadUnit], on_read: OnRead
) -> tuple[list[nn.Module], dict[OffloadUnit, list[HeldTensors]]]:
    """Calls `on_read` where code looks up a tensor of the units in its module.

    Returns the modules, and by unit the dictionaries that have tensors of that unit alone.
    """
    modules: dict[nn.Module, None] = {}
    made: list[HeldTensors] = []
    for unit in units:
        for tensor in unit.tensors:
            for attribute in tensor.attributes:
                held = attribute.tensors
                if not isinstance(held, HeldTensors):
                    made.append(held := HeldTensors(held, on_read))
                    attribute.module.__dict__["_buffers" if attribute.is_buffer else "_parameters"] = held
                held.watch(attribute.name, unit, tensor)
                modules[attribute.module] = None
    return list(modules), {unit: [held for held in made if held.unit is unit] for unit in units}


def end_watch(modules: Iterable[nn.Module]) -> None:
    """Gives modules plain dictionaries again."""
    for module in modules:
        for name in ("_parameters", "_buffers"):
            held = module.__dict__[name]
            if isinstance(held, HeldTensors):
                module.__dict__[name] = dict(held)
