"""Weights while microbatches run side by side: none may change, because microbatches would see each other's changes.

One after another, a microbatch that changes, freezes or replaces a weight does so before the next one begins. Side by
side, the others are between their first layer and their last by then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload.torch_private.running_microbatch import SideBySideError
from offload.torch_private.tensor_parts import lies_flat, parts, version_of
from offload.weights.units.partition import CutModel
from offload.weights.units.placement import ModuleAttribute
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor


class WeightsSideBySide:
    """The parameters of a model as they are when microbatches begin to run side by side."""

    def __init__(self, cut: CutModel, is_pending: Callable[[OffloadUnit], bool]):
        """`is_pending` tells whether an update of a unit is under way, which changes it until the unit is used."""
        streamed = [tensor for unit in cut.units for tensor in unit.tensors if not tensor.is_buffer]
        resident = [attributes for _, attributes in cut.resident if not attributes[0].is_buffer]
        self._held = {each: each.tensor for attributes in resident for each in attributes}
        self._held |= {attribute: tensor.host for tensor in streamed for attribute in tensor.attributes}
        self._names = {id(tensor.host): tensor.name for tensor in streamed}
        self._flags = [(tensor, tensor.requires_grad) for tensor in self._held.values() if tensor is not None]
        self._updated = {tensor for unit in cut.units if is_pending(unit) for tensor in unit.tensors}
        self._streamed = [(tensor, self._at_home(tensor)) for tensor in streamed]
        self._resident = [
            (attributes[0], tensor, version_of(tensor), _addresses(tensor))
            for attributes in resident
            if (tensor := attributes[0].tensor) is not None and not tensor.is_inference()
        ]

    def check_frozen(self) -> None:
        """Raises SideBySideError if a parameter was frozen or unfrozen since."""
        for parameter, trains in self._flags:
            if parameter.requires_grad != trains:
                raise SideBySideError(f"{self._name(parameter)} was frozen or unfrozen")

    def check(self) -> None:
        """Raises SideBySideError if a parameter was frozen, unfrozen or changed since, as far as torch counts it."""
        self.check_frozen()
        for tensor, at_home in self._streamed:
            by_forward = tensor.writes + tensor.new_writes
            if by_forward or self._at_home(tensor) != at_home:
                raise SideBySideError(f"{tensor.name} was changed")
        for attribute, parameter, version, addresses in self._resident:
            if (version_of(parameter), _addresses(parameter)) != (version, addresses):
                raise SideBySideError(f"{_name(attribute)} was changed")

    def put_back(self) -> None:
        """Gives modules what they held before: replacements of several microbatches do not end in their order."""
        for attribute, tensor in self._held.items():
            if attribute.tensor is not tensor:
                attribute.assign(tensor)

    def _at_home(self, tensor: UnitTensor) -> tuple[int, object]:
        """Returns what shows that a weight is changed at home, or gets other data."""
        if tensor.layout.is_compound:
            # Code writes to the parts of a quantised weight, or gives it others.
            return tensor.state
        return 0 if tensor in self._updated else tensor.host._version, tensor.host.data_ptr()

    def _name(self, parameter: object) -> str:
        found = next(attribute for attribute, tensor in self._held.items() if tensor is parameter)
        return self._names.get(id(parameter)) or _name(found)


def _name(attribute: ModuleAttribute) -> str:
    return f"{attribute.name} of a {type(attribute.module).__name__}"


def _addresses(tensor: torch.Tensor) -> list[int]:
    # A sparse tensor has none.
    return [part.data_ptr() for part in parts(tensor)] if lies_flat(tensor) else []
