"""OffloadUnit: the parameters that move between host and device together.

A mode names the modules at which a model is cut; `cut` turns that into units and windows. Parameters that a module
outside every cut uses as well stay resident. A parameter shared by two cuts has one home, in the first unit; the
windows of the second open that unit too, so that it is copied in once and its gradients are summed once.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from offload.memory import HostArena, HostBlock, aligned
from offload.registry import Event
from offload.schedule import keep_resident


@dataclass(frozen=True)
class Place:
    """Where a module holds a parameter or buffer."""

    module: nn.Module
    name: str
    is_buffer: bool

    @property
    def _shelf(self) -> dict[str, torch.Tensor]:
        return self.module._buffers if self.is_buffer else self.module._parameters

    @property
    def held(self) -> torch.Tensor:
        return self._shelf[self.name]

    def put(self, tensor: torch.Tensor) -> None:
        self._shelf[self.name] = tensor
        if isinstance(self.module, nn.RNNBase):
            # Recurrent layers compute with a list of their own, and on finding it outdated they would move the
            # weights, out of the slot, into one contiguous piece.
            flat = [self.module._parameters.get(name) for name in self.module._flat_weights_names]
            self.module._flat_weights = flat
            self.module._flat_weight_refs = [weight if weight is None else weakref.ref(weight) for weight in flat]


@dataclass(eq=False)
class UnitTensor:
    """A parameter or buffer of a unit: where modules hold it and where it lies in the unit's flat buffer.

    `host` is what the modules hold outside a window; its data is a view of the host block once the unit is at home.
    `device` is its stand-in in a slot for the current step: for a parameter, the leaf that autograd sees. `gradient`
    is the host memory of its gradient, `landed` the end of the last copy there and `landed_version` autograd's version
    counter behind it, `norm` the L2 norm of what landed in this step (float32 scalar on the device), where somebody
    wants it.
    """

    name: str
    host: torch.Tensor
    places: list[Place]
    offset: int
    gradient: torch.Tensor | None = None
    landed: Event | None = None
    landed_version: int = 0
    norm: torch.Tensor | None = None
    device: torch.Tensor | None = None

    @property
    def is_buffer(self) -> bool:
        return self.places[0].is_buffer

    @property
    def trains(self) -> bool:
        return self.host.requires_grad

    @property
    def has_landed_gradient(self) -> bool:
        """Whether the parameter's gradient is what landed: not replaced, dropped or changed in place since."""
        return self.host.grad is self.gradient and self.gradient._version == self.landed_version

    @property
    def version(self) -> int:
        """Autograd's version counter of a parameter at home; an in-place change shows here. 0 for a buffer."""
        return 0 if self.is_buffer else self.host._version

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This tensor's shape and dtype over its bytes in `flat` (uint8, laid out as the unit)."""
        piece = flat[self.offset : self.offset + self.nbytes]
        return piece.view(self.host.dtype).view(self.host.shape)

    def install(self, tensor: torch.Tensor) -> None:
        for place in self.places:
            place.put(tensor)

    def __str__(self) -> str:
        return f"host gradient of {self.name}"


@dataclass(eq=False)
class OffloadUnit:
    """Tensors that move together; at home they are views of `weights`, one flat host block.

    `written` ends the last copy from the device into `weights`: buffers that forward updated; `updated`, the copies of
    weights that were updated there.
    """

    name: str
    index: int
    tensors: list[UnitTensor] = field(default_factory=list)
    weights: HostBlock | None = None
    written: Event | None = None
    updated: Event | None = None
    open_windows: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer, alignment included."""
        return sum(aligned(tensor.nbytes) for tensor in self.tensors)

    @property
    def trained(self) -> list[UnitTensor]:
        """The tensors that train, in their order."""
        return [tensor for tensor in self.tensors if tensor.trains]

    @property
    def gradient_bytes(self) -> int:
        return sum(aligned(tensor.nbytes) for tensor in self.trained)

    def tensor_at(self, offset: int) -> UnitTensor:
        """The tensor to which byte `offset` of the flat buffer belongs."""
        return self.tensors[bisect_right(self.tensors, offset, key=lambda tensor: tensor.offset) - 1]

    def check_home(self) -> None:
        """Raises RuntimeError if a parameter no longer lives at home, as after `model.to(...)`, or its gradient has
        none, as that of one which was frozen when the unit was brought home."""
        for tensor in self.tensors:
            home = self.weights.bytes.data_ptr() + tensor.offset
            if not tensor.is_buffer and tensor.nbytes and tensor.host.data_ptr() != home:
                raise RuntimeError(
                    f"{tensor.name} was moved or replaced while attached: detach the mode before model.to(), .cuda()"
                    " or .half(), and attach it again"
                )
            if tensor.trains and tensor.gradient is None:
                raise RuntimeError(
                    f"{tensor.name} was frozen when the mode was attached: detach and attach again to train it"
                )

    def drop_stand_ins(self) -> None:
        """Forgets the device stand-ins: the next window makes new ones."""
        for tensor in self.tensors:
            tensor.device = None

    def bring_home(self, arena: HostArena) -> None:
        """Moves the tensors into host blocks of the arena: real values are copied, meta ones left as zeros.

        What had memory keeps its identity; what is on the meta device is replaced in its modules.
        """
        self.weights = arena.allocate(self.nbytes, f"weights of {self.name}")
        gradients = arena.allocate(self.gradient_bytes, f"gradients of {self.name}")
        used = 0
        for tensor in self.tensors:
            home = tensor.view_of(self.weights.bytes)
            tensor.host = move_into(home, tensor.host, tensor.places)
            if tensor.trains:
                flat = gradients.bytes[used : used + tensor.nbytes]
                # `.data` has a version counter of its own, which tells whether somebody changed this gradient.
                tensor.gradient = flat.view(home.dtype).view(home.shape).data
                used += aligned(tensor.nbytes)

    def __str__(self) -> str:
        return self.name


def move_into(memory: torch.Tensor, tensor: torch.Tensor, places: Iterable[Place]) -> torch.Tensor:
    """Makes `memory` the data of a parameter or buffer, keeping its values unless it is on the meta device.

    Returns the tensor that the modules hold afterwards: the same one, except for a meta tensor.
    """
    if not tensor.is_meta:
        memory.copy_(tensor.data)
        tensor.data = memory
        return tensor
    # `.data` has a version counter of its own: all tensors of a unit are views of the same memory.
    memory = memory.data
    real = nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory
    for place in places:
        place.put(real)
    return real


@dataclass(frozen=True)
class Window:
    """A module and the tensors that its forward may read, each with its unit, which must be on the device meanwhile."""

    module: nn.Module
    read: tuple[tuple[OffloadUnit, UnitTensor], ...]

    @cached_property
    def units(self) -> tuple[OffloadUnit, ...]:
        return tuple(dict.fromkeys(unit for unit, _ in self.read))


@dataclass(frozen=True)
class CutModel:
    """A model cut into units: `windows` open them, `resident` is what is left on the device, with its places."""

    units: list[OffloadUnit]
    windows: list[Window]
    resident: list[tuple[torch.Tensor, list[Place]]]

    @property
    def resident_bytes(self) -> int:
        return sum(tensor.nbytes for tensor, _ in self.resident)

    @property
    def unit_bytes(self) -> int:
        return sum(unit.nbytes for unit in self.units)

    @property
    def gradient_bytes(self) -> int:
        return sum(unit.gradient_bytes for unit in self.units)

    @property
    def largest_unit_bytes(self) -> int:
        return max((unit.nbytes for unit in self.units), default=0)


def open_at_once(model: nn.Module, windows: Iterable[Window]) -> list[OffloadUnit]:
    """The units whose windows are open at a time, one inside the other, where these are the most in `model`."""
    return list(_open_at_once(model, {window.module: window.units for window in windows}, {}))


def _open_at_once(
    module: nn.Module, units_of: dict[nn.Module, tuple[OffloadUnit, ...]], outside: dict[OffloadUnit, None]
) -> dict[OffloadUnit, None]:
    opened = outside | dict.fromkeys(units_of.get(module, ()))
    return max((_open_at_once(child, units_of, opened) for child in module.children()), key=len, default=opened)


@dataclass(frozen=True)
class Root:
    """A module at which a model is cut; roots of one name make one unit.

    `deep`: with everything below it; else with the tensors that the module holds itself.
    """

    name: str
    module: nn.Module
    deep: bool = True

    def modules(self) -> Iterable[nn.Module]:
        return self.module.modules() if self.deep else (self.module,)

    def tensors(self) -> Iterable[torch.Tensor]:
        yield from self.module.parameters(recurse=self.deep)
        yield from self.module.buffers(recurse=self.deep)


def cut(model: nn.Module, roots: Sequence[Root]) -> CutModel:
    """Cuts `model` at the root modules: one unit for the parameters and buffers of each name.

    Touches nothing, so it works on a model of the meta device. A root that owns nothing gives no unit, one that is
    named twice gives one, under its first name. Raises ValueError when one root lies inside another.
    """
    roots = list({root.module: root for root in reversed(roots)}.values())[::-1]
    root_of = _roots_by_module(roots)
    places: dict[torch.Tensor, list[Place]] = {}
    names: dict[torch.Tensor, str] = {}
    for prefix, module in model.named_modules():
        for is_buffer, held in ((False, module._parameters), (True, module._buffers)):
            for attribute, tensor in held.items():
                if tensor is not None:
                    places.setdefault(tensor, []).append(Place(module, attribute, is_buffer))
                    names.setdefault(tensor, f"{prefix}.{attribute}".lstrip("."))

    units: dict[str, OffloadUnit] = {}
    unit_of: dict[torch.Tensor, tuple[OffloadUnit, UnitTensor]] = {}
    resident = []
    for tensor, where in places.items():
        owners = [root_of.get(place.module) for place in where]
        if None in owners:
            resident.append((tensor, where))
            continue
        name = owners[0].name
        unit = units.setdefault(name, OffloadUnit(name, len(units)))
        unit.tensors.append(UnitTensor(names[tensor], tensor, where, unit.nbytes))
        unit_of[tensor] = unit, unit.tensors[-1]
    return CutModel(list(units.values()), _windows(roots, unit_of), resident)


def keep_on_device(model: CutModel, amount: str | int) -> CutModel:
    """`model` with `amount` of its units made resident; see `schedule.keep_resident` for what it may be."""
    kept = keep_resident([unit.nbytes for unit in model.units], amount)
    streamed = [unit for index, unit in enumerate(model.units) if index not in kept]
    resident = list(model.resident)
    for index in sorted(kept):
        resident += [(tensor.host, tensor.places) for tensor in model.units[index].tensors]
    windows = []
    for window in model.windows:
        read = tuple((unit, tensor) for unit, tensor in window.read if unit.index not in kept)
        if read:
            windows.append(Window(window.module, read))
    for index, unit in enumerate(streamed):
        unit.index = index
    return CutModel(streamed, windows, resident)


def _roots_by_module(roots: Sequence[Root]) -> dict[nn.Module, Root]:
    root_of: dict[nn.Module, Root] = {}
    for root in roots:
        for module in root.modules():
            if root_of.setdefault(module, root) is not root:
                raise ValueError(f"{root.name} lies inside {root_of[module].name}: units must not overlap")
    return root_of


def _windows(roots: Sequence[Root], unit_of: dict[torch.Tensor, tuple[OffloadUnit, UnitTensor]]) -> list[Window]:
    windows = []
    for root in roots:
        for module in root.modules():
            # A root's forward may read any tensor below it. Modules inside get windows of their own as well:
            # activation checkpointing applied before attaching recomputes a root's forward without its window.
            used = root.tensors() if module is root.module else Root(root.name, module, deep=False).tensors()
            read = tuple(dict.fromkeys(unit_of[tensor] for tensor in used if tensor in unit_of))
            if read:
                windows.append(Window(module, read))
    return windows
