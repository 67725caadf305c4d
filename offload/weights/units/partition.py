"""Cuts a model into units, joins those that are too small, and finds the windows in which its modules use them.

A copy costs some microseconds to begin, and so do its events, whatever its size: so units that are too small to travel
alone go with a neighbour. A Linear layer with a low-rank adapter (LoRA, Hu et al. 2021) is three layers, two of them of
less than a megabyte.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from offload.knobs import KnobError, parse_bytes
from offload.torch_private.tensor_parts import lies_flat, true_bytes, wraps
from offload.weights.units.placement import ModuleAttribute, check_buffer, check_frozen
from offload.weights.units.unit import OffloadUnit, UnitTensor

# Of the bytes of a model, for the units that stay on the device first. While backward computes two blocks of 32 (7B at
# 4k tokens: 12 ms), the gradients of the third come home (4 to 8 ms), and the host starts the next step (4): it is
# ready 4 ms before the device, where with one block the device waited for it and for the first weights, 17 ms (two
# H100s).
FIRST_SHARE = 1 / 16


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
    """`model`, cut into units, which the modules of `windows` use.

    `resident` are the tensors that stay on the device, each with the attributes that hold it.
    """

    model: nn.Module
    units: list[OffloadUnit]
    windows: list[Window]
    resident: list[tuple[torch.Tensor, list[ModuleAttribute]]]

    @property
    def around(self) -> list[nn.Module]:
        """The modules that have windows inside and no window of their own."""
        windowed = {window.module for window in self.windows}
        return [
            module
            for module in self.model.modules()
            if module not in windowed and any(inner in windowed for inner in module.modules())
        ]

    @property
    def resident_bytes(self) -> int:
        return sum(true_bytes(tensor) for tensor, _ in self.resident)

    @property
    def unit_bytes(self) -> int:
        return sum(unit.nbytes for unit in self.units)

    @property
    def fixed_bytes(self) -> int:
        """The bytes of the fixed units, which take no memory of the host."""
        return sum(unit.nbytes for unit in self.units if unit.is_fixed)

    @property
    def gradient_bytes(self) -> int:
        return sum(unit.gradient_bytes for unit in self.units)

    @property
    def largest_unit_bytes(self) -> int:
        return max((unit.nbytes for unit in self.units), default=0)


def open_at_once(model: nn.Module, windows: Iterable[Window]) -> list[OffloadUnit]:
    """Returns the largest set of units in `model` whose windows are open at the same time, one inside the other."""
    return list(_open_at_once(model, {window.module: window.units for window in windows}, {}))


def _open_at_once(
    module: nn.Module, units_of: dict[nn.Module, tuple[OffloadUnit, ...]], outside: dict[OffloadUnit, None]
) -> dict[OffloadUnit, None]:
    opened = outside | dict.fromkeys(units_of.get(module, ()))
    return max((_open_at_once(child, units_of, opened) for child in module.children()), key=len, default=opened)


@dataclass(frozen=True)
class CutPoint:
    """A module at which a model is cut; cut points of one name make one unit.

    `deep`: the unit has all tensors below the module; else those that the module holds itself.
    """

    name: str
    module: nn.Module
    deep: bool = True

    def modules(self) -> Iterable[nn.Module]:
        return self.module.modules() if self.deep else (self.module,)

    def tensors(self) -> Iterable[torch.Tensor]:
        yield from self.module.parameters(recurse=self.deep)
        yield from self.module.buffers(recurse=self.deep)


def cut(model: nn.Module, cut_points: Sequence[CutPoint], trained_stays: bool = False) -> CutModel:
    """Cuts `model` at the cut points: one unit for the parameters and buffers of each name. Changes nothing.

    A module without tensors makes no unit; one that is named twice makes one, under its first name. A tensor that two
    units use belongs to the first. Resident stay tensors of modules that several cut points have in common, those that
    a module outside every cut uses too, those that do not lie flat (sparse, torch's quantised dtypes), and with
    `trained_stays` what trains. Raises ValueError when a deep cut point lies inside another, and for a parameter that
    trains and wraps other tensors.
    """
    cut_points = list({point.module: point for point in reversed(cut_points)}.values())[::-1]
    point_of = _cut_points_by_module(cut_points)
    attributes: dict[torch.Tensor, list[ModuleAttribute]] = {}
    names: dict[torch.Tensor, str] = {}
    for prefix, module in model.named_modules():
        for is_buffer, tensors in ((False, module._parameters), (True, module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    attributes.setdefault(tensor, []).append(ModuleAttribute(module, name, is_buffer))
                    names.setdefault(tensor, f"{prefix}.{name}".lstrip("."))

    _check_memory(names)
    units: dict[str, OffloadUnit] = {}
    unit_of: dict[torch.Tensor, tuple[OffloadUnit, UnitTensor]] = {}
    resident = []
    for tensor, holders in attributes.items():
        owners = [point_of.get(holder.module) for holder in holders]
        if None in owners or (trained_stays and tensor.requires_grad) or not lies_flat(tensor):
            resident.append((tensor, holders))
            continue
        check_frozen(names[tensor], tensor)
        if holders[0].is_buffer:
            check_buffer(names[tensor], tensor)
        name = owners[0].name
        unit = units.setdefault(name, OffloadUnit(name, len(units)))
        unit.tensors.append(UnitTensor(names[tensor], tensor, holders, unit.nbytes))
        unit_of[tensor] = unit, unit.tensors[-1]
    return CutModel(model, list(units.values()), _windows(cut_points, unit_of), resident)


def keep_on_device(parts: CutModel, amount: str | int) -> CutModel:
    """Returns `parts` with `amount` of the units made resident; see `keep_resident`."""
    kept = keep_resident([unit.nbytes for unit in parts.units], amount)
    streamed = [unit for index, unit in enumerate(parts.units) if index not in kept]
    resident = list(parts.resident)
    for index in sorted(kept):
        resident += [(tensor.host, tensor.attributes) for tensor in parts.units[index].tensors]
    windows = []
    for window in parts.windows:
        read = tuple((unit, tensor) for unit, tensor in window.read if unit.index not in kept)
        if read:
            windows.append(Window(window.module, read))
    for index, unit in enumerate(streamed):
        unit.index = index
    return CutModel(parts.model, streamed, windows, resident)


def _cut_points_by_module(cut_points: Sequence[CutPoint]) -> dict[nn.Module, CutPoint]:
    """Returns the cut point of each module, without modules that several cut points have in common."""
    point_of: dict[nn.Module, CutPoint] = {}
    common: set[nn.Module] = set()
    for point in cut_points:
        for module in point.modules():
            other = point_of.setdefault(module, point)
            if other is point:
                continue
            if module in (point.module, other.module) and point.deep and other.deep:
                raise ValueError(f"{point.name} lies inside {other.name}: units must not overlap")
            common.add(module)
    return {module: point for module, point in point_of.items() if module not in common}


def _windows(
    cut_points: Sequence[CutPoint], unit_of: dict[torch.Tensor, tuple[OffloadUnit, UnitTensor]]
) -> list[Window]:
    windows = []
    for point in cut_points:
        for module in point.modules():
            # The module at which the model is cut may read any tensor below it. Modules inside get windows of their own
            # as well: activation checkpointing that was applied before attaching recomputes the outer module's forward
            # without its window.
            used = CutPoint(point.name, module, module is point.module and point.deep).tensors()
            read = tuple(dict.fromkeys(unit_of[tensor] for tensor in used if tensor in unit_of))
            if read:
                windows.append(Window(module, read))
    return windows


def keep_resident(sizes: Sequence[int], amount: str | int) -> set[int]:
    """Chooses which of the units of `sizes` bytes stay on the device.

    `amount` is a number of units (`4`), a share of the bytes (`25%`) or bytes (`2GiB`), and never exceeded. The first
    units that fit are in it, at least one and up to `FIRST_SHARE`: a step starts with their weights and ends with their
    gradients, and nothing else computes meanwhile. The rest is spread evenly over the order of use. Raises KnobError
    for any other amount, and for more units than there are.
    """
    text = str(amount).strip()
    first = max(1, bisect_right(list(accumulate(sizes)), FIRST_SHARE * sum(sizes)))
    if text.isdigit():
        count = int(text)
        if count > len(sizes):
            raise KnobError("resident", amount, f"the model has {len(sizes)} units")
        first = min(first, count)
        others, spread = len(sizes) - first, count - first
        return {*range(first), *(first + (2 * k + 1) * others // (2 * spread) for k in range(spread))}
    budget = amount_bytes(text, sum(sizes))
    kept: set[int] = set()
    for index, size in enumerate(sizes[:first]):
        if size <= budget:
            kept.add(index)
            budget -= size
    rest = sizes[first:]
    share = budget / max(sum(rest), 1)
    # The start value puts each in the middle of the units of which it is the share.
    owed = rest[0] / 2 if rest else 0.0
    for index, size in enumerate(rest, first):
        owed += share * size
        if owed + 1e-6 * size >= size <= budget:
            kept.add(index)
            owed -= size
            budget -= size
    return kept


def check_amount(amount: str | int) -> None:
    """Raises KnobError where `keep_resident` would refuse `amount` for every model."""
    text = str(amount).strip()
    if not text.isdigit():
        amount_bytes(text, 0)


def amount_bytes(text: str, total: int) -> int:
    """Returns the bytes of an amount that is a share of `total` ("25%") or bytes ("2GiB")."""
    share = text.removesuffix("%")
    try:
        if share == text:
            return parse_bytes("resident", text)
        if 0 <= float(share) <= 100:
            return int(float(share) * total / 100)
    except ValueError:
        pass
    problem = "must be a number of units (4), a share (25%, up to 100%) or bytes (2GiB, 512MiB)"
    raise KnobError("resident", text, problem)


def _check_memory(names: dict[torch.Tensor, str]) -> None:
    """Raises ValueError for parameters that cannot be given memory: without shape or bytes, expanded, overlapping.

    Two that share bytes without being one would each get memory of its own, and so would elements of an expanded one,
    for which kernels may round in another way.
    """
    spans = []
    for tensor, name in names.items():
        if is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet: run the model once before the mode attaches to it")
        if getattr(tensor, "bnb_quantized", True) is False and not tensor.is_meta:
            raise ValueError(f"{name} is not quantised yet: call .to(device) of its layer before the mode attaches")
        is_parameter = isinstance(tensor, nn.Parameter) and tensor.layout is torch.strided and not wraps(tensor)
        if is_parameter and any(
            size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise ValueError(
                f"{name} is expanded, so several of its elements are one number in memory: give each its own before the"
                " mode attaches, as in p.data = p.data.contiguous()"
            )
        if is_parameter and not tensor.is_meta and tensor.numel():
            start = tensor.data_ptr()
            extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            spans.append((start, start + extent * tensor.itemsize, name))
    for (_, end, name), (start, _, other) in pairwise(sorted(spans)):
        if start < end:
            raise ValueError(
                f"{name} and {other} share memory and are two parameters: make them one, as in b.weight = a.weight, or"
                " give each its own memory"
            )


# A unit of fewer bytes joins a neighbour. A bus of 50 GB/s copies as many in 20 microseconds, about as long as a copy
# takes to begin: smaller ones have less than half the speed of large ones.
SMALL_BYTES = 2**20


@dataclass
class _Run:
    """Units that travel together, in the order of the model.

    `closed`: nothing else joins them. `whole` is the module that has all their tensors and no others, if there is one.
    """

    units: list[OffloadUnit]
    closed: bool = False
    whole: nn.Module | None = None

    @property
    def is_small(self) -> bool:
        return not self.closed and sum(unit.nbytes for unit in self.units) < SMALL_BYTES

    def joined_by(self, other: _Run) -> _Run:
        return _Run(self.units + other.units)

    def within(self, module: nn.Module) -> _Run:
        """Returns this run as all of `module`, if it is all of it."""
        tensors = {tensor.host for unit in self.units for tensor in unit.tensors}
        is_whole = len(self.units) > 1 and tensors == {*module.parameters(), *module.buffers()}
        return _Run(self.units, self.closed, module) if is_whole else self


def join_small(model: nn.Module, cut_points: Sequence[CutPoint]) -> list[CutPoint]:
    """Returns the cut points such that units of fewer than `SMALL_BYTES` travel with a neighbour.

    Neighbours follow each other in the module around both. Small ones join one another; what is small still joins the
    unit before, else the one after. Elements of a ModuleList (blocks, experts) join nothing outside of themselves: they
    may be used one without the other. Units that are all of a module become one under its name, others are called FIRST
    to LAST. Raises ValueError as `cut` does.
    """
    units = {unit.name: unit for unit in cut(model, cut_points).units}
    unit_at: dict[nn.Module, OffloadUnit] = {}
    deep = {point.name for point in cut_points if point.deep}
    for point in cut_points:
        # Modules of a unit that has a layer of its own travel with that layer.
        if point.name in units and (point.deep or point.name not in deep):
            unit_at.setdefault(point.module, units[point.name])
    runs = [run for run in _runs(model, unit_at, set()) if len(run.units) > 1]
    run_of = {unit.name: run for run in runs for unit in run.units}
    whole_around = {module: run.whole for run in runs if run.whole is not None for module in run.whole.modules()}
    paths = {module: path or type(module).__name__ for path, module in model.named_modules()}
    joined: dict[CutPoint, None] = {}
    for point in cut_points:
        if point.module in whole_around:
            whole = whole_around[point.module]
            joined[CutPoint(paths[whole], whole)] = None
        elif point.name in run_of:
            first, *_, last = run_of[point.name].units
            joined[CutPoint(f"{first.name} to {last.name}", point.module, point.deep)] = None
        else:
            joined[point] = None
    return list(joined)


def _runs(module: nn.Module, unit_at: dict[nn.Module, OffloadUnit], seen: set[nn.Module]) -> list[_Run]:
    """Returns the units inside a module as they travel; `seen` are the modules that were visited, and are left out."""
    if module in seen:
        return []
    seen.add(module)
    own = [_Run([unit_at[module]])] if module in unit_at else []
    runs = own + [run for child in module.children() for run in _runs(child, unit_at, seen)]
    if isinstance(module, nn.ModuleList):
        return [_Run(run.units, closed=True, whole=run.whole) for run in runs]
    # Small ones until they are no longer small; then every one that is small still.
    joined = _joined(runs, lambda before, run: before.is_small and run.is_small)
    joined = _joined(
        joined, lambda before, run: not before.closed and not run.closed and (before.is_small or run.is_small)
    )
    return [run.within(module) for run in joined] if len(joined) == 1 else joined


def _joined(runs: Iterable[_Run], belong: Callable[[_Run, _Run], bool]) -> list[_Run]:
    """Joins runs that follow each other and belong together, each to what the one before has become."""
    joined: list[_Run] = []
    for run in runs:
        if joined and belong(joined[-1], run):
            joined.append(joined.pop().joined_by(run))
        else:
            joined.append(run)
    return joined
