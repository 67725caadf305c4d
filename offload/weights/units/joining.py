"""Joins units that are too small to travel alone to a neighbour, so that one copy takes both.

A copy costs some microseconds to begin, and so do its events, whatever its size. A Linear layer with a low-rank adapter
(LoRA, Hu et al. 2021) is three layers, two of them of less than a megabyte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from offload.weights.units.partition import CutPoint, cut
from offload.weights.units.unit import OffloadUnit

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
