"""The memory of a gradient at home: when it is made, and who holds it."""

from __future__ import annotations

import torch
from torch import nn

from offload.memory.host_memory import HostArena
from offload.torch_private.torch_internals import count_references
from offload.weights.units.unit_tensor import UnitTensor
from tests.offload.helpers.units import tensor_of


def is_held(tensor: UnitTensor) -> bool:
    return count_references(tensor.gradient.memory) > 1


def test_the_users_of_a_gradient_are_seen():
    tensor = tensor_of(nn.Parameter(torch.ones(5, 3)))
    tensor.gradient.make_memory(HostArena(torch.device("cpu")))
    assert not is_held(tensor)
    row = tensor.gradient.memory[0]
    assert is_held(tensor)
    del row
    assert not is_held(tensor)
    array = tensor.gradient.memory.numpy()
    assert is_held(tensor)
    del array
    same = tensor.gradient.memory
    assert is_held(tensor)
    assert same is tensor.gradient.memory


def test_memory_of_its_own_has_the_shape_and_dtype_of_the_parameter():
    tensor, arena = tensor_of(nn.Parameter(torch.ones(5, 3, dtype=torch.bfloat16))), HostArena(torch.device("cpu"))
    tensor.gradient.make_memory(arena)
    memory = tensor.gradient.memory
    assert (memory.shape, memory.dtype) == ((5, 3), torch.bfloat16)
    assert arena.pageable_bytes == tensor.nbytes
