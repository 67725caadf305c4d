"""Looks at the tensors of a unit."""

from __future__ import annotations

import torch

from offload.weights.units.layouts import over
from offload.weights.units.unit_tensor import UnitTensor


def data_in(tensor: UnitTensor, flat: torch.Tensor) -> torch.Tensor:
    """Returns the data of `tensor` over its bytes in `flat` (uint8, laid out as the unit)."""
    return over(tensor.host, tensor.views_of(flat))
