"""Slices of units: all bytes once, each slice aligned, and the elements of tensors in them."""

import pytest
import torch
from torch import nn

from offload.sharing.slices import SHARED_ALIGNMENT_BYTES, Slices, check_divisible, slices_of
from offload.weights.units.placement import ModuleAttribute
from offload.weights.units.unit import OffloadUnit, UnitTensor


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("nbytes", [1, 255, 16384, 32767, 200_000])
def test_slices_cover_the_buffer_once(nbytes: int, count: int):
    divided = Slices(nbytes, count)
    owners = torch.zeros(nbytes, dtype=torch.int64)
    assert divided.padded_bytes % (count * SHARED_ALIGNMENT_BYTES) == 0
    for rank in range(count):
        start, stop = divided.own(rank)
        assert start == min(rank * divided.padded_bytes // count, nbytes)
        assert stop - start <= divided.padded_bytes // count
        owners[start:stop] += 1
    assert owners.eq(1).all()
    assert nbytes <= divided.padded_bytes < nbytes + count * SHARED_ALIGNMENT_BYTES


def test_nothing_has_no_slices():
    assert Slices(0, 2).own(1) == (0, 0)
    assert Slices(0, 2).padded_bytes == 0


def unit_of(*tensors: torch.Tensor) -> OffloadUnit:
    unit, module = OffloadUnit("unit", 0, alignment=SHARED_ALIGNMENT_BYTES), nn.Module()
    for number, tensor in enumerate(tensors):
        parameter = nn.Parameter(tensor)
        module.register_parameter(f"p{number}", parameter)
        unit.tensors.append(
            UnitTensor(f"p{number}", parameter, [ModuleAttribute(module, f"p{number}", False)], unit.nbytes)
        )
    return unit


def test_every_element_is_in_the_slices_of_one_process():
    unit = unit_of(torch.zeros(70, 50), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.bfloat16))
    for tensor in unit.tensors:
        owners = torch.zeros(tensor.host.numel(), dtype=torch.int64)
        for rank in range(3):
            for part in slices_of(unit, 3).elements(tensor, rank):
                # A block of states in 8 bits.
                assert part.start % 256 == 0
                owners[part.start : part.stop] += 1
        assert owners.eq(1).all()


def test_a_parameter_with_other_strides_is_refused():
    check_divisible(unit_of(torch.zeros(2, 3)))
    with pytest.raises(ValueError, match=r"^p0 has strides \(1, 2\), so processes that share it cannot update slices"):
        check_divisible(unit_of(torch.zeros(3, 2).t()))


def test_a_unit_whose_home_is_a_file_is_refused():
    unit = unit_of(torch.zeros(2, 3))
    unit.is_fixed = True
    with pytest.raises(
        ValueError, match=r"^unit has its home in a file \(source=mapped\), which processes do not share"
    ):
        check_divisible(unit)
