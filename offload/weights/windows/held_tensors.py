"""The forwards that are running, and the dictionaries of modules, which tell them when a weight is read.

Most weights are read by the forward of the module that holds them, which has a window by then. But any code may read
them: a parent that computes with the weight of a layer that it never calls (Mamba's convolution, DoRA), a user of a
ParameterList, a hook. `module.weight` is a look-up in `module._parameters`, so that is where such a read is noticed.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from offload.memory.device_slots import DeviceSlot, DeviceSlots
from offload.streams.registry import Stream
from offload.torch_private.module_contexts import OwnHook
from offload.torch_private.tensor_parts import version_of
from offload.torch_private.torch_internals import tree_flatten, tree_unflatten
from offload.weights.units.unit import OffloadUnit, UnitTensor
from offload.weights.windows.stand_in import data_was_taken

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

        def copy_out(module: nn.Module, state: dict, prefix: str, *_: object) -> None:
            for name in (*module._parameters, *module._buffers):
                tensor = state.get(prefix + name)
                if tensor is not None and slots.slot_of(tensor) is not None:
                    state[prefix + name] = tensor.clone()

        super().__init__(module, module.register_state_dict_post_hook, copy_out)


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


class Scope:
    """The forward of `module`, which is running: the units whose windows it opened, and the copies that it got."""

    __slots__ = ("copies", "module", "units")

    def __init__(self, module: nn.Module):
        self.module = module
        self.units: list[OffloadUnit] = []
        self.copies: dict[UnitTensor, torch.Tensor] = {}

    def check_copies(self) -> None:
        """Raises RuntimeError where the forward has changed a copy."""
        for tensor, copied in self.copies.items():
            if version_of(copied) or data_was_taken(copied):
                raise RuntimeError(
                    f"{tensor.name} was changed in a forward while all device slots are in use, and the change would be"
                    " lost: give the mode more slots"
                )


class RunningForwards:
    """The scopes of one thread, from the outermost to the innermost, and the units whose windows they opened.

    `pack` is the innermost pack function of the windows, `compute` the stream for which they had units fetched.
    """

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.units: set[OffloadUnit] = set()
        self.pack: Callable | None = None
        self.compute: Stream | None = None

    def end(self, scope: Scope) -> None:
        """Ends the forward of `scope`."""
        if self.scopes[-1] is scope:
            self.scopes.pop()
        else:
            self.scopes.remove(scope)
        if scope.units:
            self.units = {unit for other in self.scopes for unit in other.units}


class ThreadForwards(threading.local):
    """`running`: the forwards of the thread that asks. Microbatches side by side have each their own.

    The garbage collector closes what a thread leaves open, in any thread: keep the object, and do not ask again.
    """

    def __init__(self) -> None:
        self.running = RunningForwards()


def copy_returned(
    result: object, slot_of: Callable[[torch.Tensor], DeviceSlot | None], closing: Callable[[OffloadUnit], bool]
) -> object:
    """Returns what a forward returned, tensors in a slot of a unit that is `closing` replaced by copies.

    A module may return its own parameter or buffer, or a view of one: as it is, or in containers that torch takes apart
    (`torch.utils._pytree`), which are made anew then. Gradients flow through the copies. Raises RuntimeError for such a
    tensor in an attribute of another object.
    """

    def needs_copy(tensor: object) -> bool:
        if not isinstance(tensor, torch.Tensor):
            return False
        slot = slot_of(tensor)
        return slot is not None and slot.content is not None and closing(slot.content)

    if isinstance(result, torch.Tensor):
        return result.clone() if needs_copy(result) else result
    found, structure = tree_flatten(result)
    for each in found:
        for name, held in getattr(each, "__dict__", {}).items():
            if needs_copy(held):
                raise RuntimeError(
                    f"a forward returns a {type(each).__name__} whose attribute {name} is a weight or buffer that"
                    " streams, which is soon overwritten: return it in a tuple or a dictionary, or a clone of it"
                )
    if not any(map(needs_copy, found)):
        return result
    return tree_unflatten([each.clone() if needs_copy(each) else each for each in found], structure)
