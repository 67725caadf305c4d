"""Makes units and their tensors, and looks at them."""

import torch
from torch import nn

from offload.weights.units.placement import ModuleAttribute, over
from offload.weights.units.unit import OffloadUnit, UnitTensor


def tensor_of(parameter: nn.Parameter, name: str = "weight") -> UnitTensor:
    """The tensor of a unit for a parameter, which a module of its own holds."""
    module = nn.Module()
    module.register_parameter(name, parameter)
    return UnitTensor(name, parameter, [ModuleAttribute(module, name, False)], 0)


def unit_of_two() -> OffloadUnit:
    """A unit of two parameters of one element each."""
    tensors = [tensor_of(nn.Parameter(torch.zeros(1)), name) for name in ("first", "second")]
    return OffloadUnit("block", 0, tensors)


def data_in(tensor: UnitTensor, flat: torch.Tensor) -> torch.Tensor:
    """Returns the data of `tensor` over its bytes in `flat` (uint8, laid out as the unit)."""
    return over(tensor.host, tensor.views_of(flat))
