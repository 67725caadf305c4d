"""OffloadUnit: the parameters that move between host and device together.

A mode names the modules at which a model is cut; `cut` turns that into units and windows. Parameters that a module
outside every cut uses as well stay resident. A parameter shared by two cuts has one home, in the first unit; the
windows of the second open that unit too, so that it is copied in once and its gradients are summed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from offload.memory import HostArena, HostBlock, aligned
from offload.schedule import keep_resident


@dataclass(eq=False)
class UnitTensor:
    """A parameter of a unit: where modules hold it and where it lies in the unit's flat buffer.

    `parameter` is what the modules hold outside a window: its data is a view of the host block once the unit is at
    home. `leaf` is its stand-in on the device for the current step, the leaf that autograd sees.
    """

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]]
    offset: int
    gradient: torch.Tensor | None = None
    landed: object | None = None
    leaf: nn.Parameter | None = None

    @property
    def nbytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This tensor's shape and dtype over its bytes in `flat` (uint8, laid out as the unit)."""
        piece = flat[self.offset : self.offset + self.nbytes]
        return piece.view(self.parameter.dtype).view(self.parameter.shape)

    def install(self, parameter: nn.Parameter) -> None:
        for module, attribute in self.places:
            module._parameters[attribute] = parameter

    def __str__(self) -> str:
        return f"host gradient of {self.name}"


@dataclass(eq=False)
class OffloadUnit:
    """Tensors that move together; at home they are views of `weights`, one flat host block."""

    name: str
    index: int
    tensors: list[UnitTensor] = field(default_factory=list)
    weights: HostBlock | None = None
    open_windows: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer, alignment included."""
        return sum(aligned(tensor.nbytes) for tensor in self.tensors)

    @property
    def gradient_bytes(self) -> int:
        return sum(aligned(tensor.nbytes) for tensor in self.tensors if tensor.parameter.requires_grad)

    def versions(self) -> tuple[int, ...]:
        """Autograd's version counters of the tensors at home; an in-place change of one shows here."""
        return tuple(tensor.parameter._version for tensor in self.tensors)

    def drop_leaves(self) -> None:
        """Forgets the device stand-ins: the next window makes new ones."""
        for tensor in self.tensors:
            tensor.leaf = None

    def bring_home(self, arena: HostArena) -> None:
        """Moves the tensors into host blocks of the arena: real values are copied, meta ones left as zeros.

        A parameter that had memory keeps its identity; one on the meta device is replaced in its modules.
        """
        self.weights = arena.allocate(self.nbytes, f"weights of {self.name}")
        gradients = arena.allocate(self.gradient_bytes, f"gradients of {self.name}")
        used = 0
        for tensor in self.tensors:
            home = tensor.view_of(self.weights.bytes)
            tensor.parameter = place_parameter(tensor.parameter, home, tensor.places)
            if tensor.parameter.requires_grad:
                flat = gradients.bytes[used : used + tensor.nbytes]
                tensor.gradient = flat.view(home.dtype).view(home.shape)
                used += aligned(tensor.nbytes)

    def __str__(self) -> str:
        return self.name


def place_parameter(
    parameter: nn.Parameter, memory: torch.Tensor, places: Iterable[tuple[nn.Module, str]]
) -> nn.Parameter:
    """Makes `memory` the parameter's data, keeping its values unless it is on the meta device.

    Returns the parameter that the modules hold afterwards.
    """
    if not parameter.is_meta:
        memory.copy_(parameter.data)
        parameter.data = memory
        return parameter
    real = nn.Parameter(memory, requires_grad=parameter.requires_grad)
    for module, attribute in places:
        module._parameters[attribute] = real
    return real


@dataclass(frozen=True)
class Window:
    """A module and the units that must be on the device while its forward runs."""

    module: nn.Module
    units: tuple[OffloadUnit, ...]


@dataclass(frozen=True)
class CutModel:
    """A model cut into units: `windows` open them, `resident` are the parameters left on the device."""

    units: list[OffloadUnit]
    windows: list[Window]
    resident: list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]

    @property
    def resident_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter, _ in self.resident)

    @property
    def unit_bytes(self) -> int:
        return sum(unit.nbytes for unit in self.units)


def cut(model: nn.Module, roots: Sequence[tuple[str, nn.Module]]) -> CutModel:
    """Cuts `model` at the named root modules: one unit for the parameters in the subtree of each.

    Touches nothing, so it works on a model of the meta device. A root without parameters of its own gives no unit.
    Raises ValueError when one root lies inside another.
    """
    root_of = _roots_by_module(roots)
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, attribute))
                named.setdefault(id(parameter), (f"{prefix}.{attribute}".lstrip("."), parameter))

    units: dict[int, OffloadUnit] = {}
    unit_of: dict[int, OffloadUnit] = {}
    resident = []
    for key, (name, parameter) in named.items():
        owners = [root_of.get(module) for module, _ in places[key]]
        if None in owners:
            resident.append((parameter, places[key]))
            continue
        unit = units.setdefault(owners[0], OffloadUnit(roots[owners[0]][0], len(units)))
        unit.tensors.append(UnitTensor(name, parameter, places[key], unit.nbytes))
        unit_of[key] = unit
    return CutModel(list(units.values()), _windows(roots, unit_of), resident)


def keep_on_device(model: CutModel, amount: str | int) -> CutModel:
    """`model` with `amount` of its units made resident; see `schedule.keep_resident` for what it may be."""
    kept = keep_resident([unit.nbytes for unit in model.units], amount)
    streamed = [unit for index, unit in enumerate(model.units) if index not in kept]
    resident = list(model.resident)
    for index in sorted(kept):
        resident += [(tensor.parameter, tensor.places) for tensor in model.units[index].tensors]
    windows = []
    for window in model.windows:
        units = tuple(unit for unit in window.units if unit.index not in kept)
        if units:
            windows.append(Window(window.module, units))
    for index, unit in enumerate(streamed):
        unit.index = index
    return CutModel(streamed, windows, resident)


def _roots_by_module(roots: Sequence[tuple[str, nn.Module]]) -> dict[nn.Module, int]:
    root_of: dict[nn.Module, int] = {}
    for index, (name, root) in enumerate(roots):
        for module in root.modules():
            if root_of.setdefault(module, index) != index:
                raise ValueError(f"{name} lies inside {roots[root_of[module]][0]}: units must not overlap")
    return root_of


def _windows(roots: Sequence[tuple[str, nn.Module]], unit_of: dict[int, OffloadUnit]) -> list[Window]:
    windows = []
    for _, root in roots:
        for module in root.modules():
            # A root's forward may read any parameter below it. Modules inside get windows of their own as well:
            # activation checkpointing that wraps a root's forward recomputes it without the root's hooks.
            used = root.parameters() if module is root else module._parameters.values()
            units = {unit_of[id(p)]: None for p in used if p is not None and id(p) in unit_of}
            if units:
                windows.append(Window(module, tuple(units)))
    return windows
