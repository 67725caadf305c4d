"""Refuses writes of a forward to a buffer that a model of another open step has too.

Each mode has a home of its own for the buffer, and takes over what others have written between steps only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from offload.weights.units.unit import OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor

# The units of each owner of an open step.
_open: WeakKeyDictionary[object, Sequence[OffloadUnit]] = WeakKeyDictionary()


def begin_step(owner: object, units: Sequence[OffloadUnit]) -> None:
    _open[owner] = units


def end_step(owner: object) -> None:
    _open.pop(owner, None)


def check_written(owner: object, written: Iterable[UnitTensor]) -> None:
    """Raises RuntimeError for a buffer among the tensors that a forward has `written` in a step of `owner`."""
    if len(_open) < 2 or owner not in _open:
        return
    others = [units for other, units in list(_open.items()) if other is not owner]
    hosts = {id(tensor.host) for units in others for unit in units for tensor in unit.tensors if tensor.is_buffer}
    for tensor in written:
        if id(tensor.host) in hosts:
            raise RuntimeError(
                f"a forward has changed the buffer {tensor.name}, which a model of another step that is open has too:"
                " take the steps one after the other, or give each model a buffer of its own"
            )
