"""Slices of units: all bytes once, each slice aligned, and the elements of tensors in them."""

import pytest
import torch
from torch import nn

from offload.sharing import gradient_buckets, separate_gradients
from offload.sharing.slices import SHARED_ALIGNMENT_BYTES, Slices, check_divisible, slices_of
from offload.weights.units.placement import ModuleAttribute
from offload.weights.units.unit import OffloadUnit, UnitTensor
from training.parallel.reduce import exchange_bytes


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


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(size, dtype=dtype, device="meta")) for size in sizes]


def sizes(given: list[nn.Parameter], nbytes: int) -> list[list[int]]:
    return [[p.numel() for p in bucket.parameters] for bucket in gradient_buckets(given, nbytes=nbytes)]


def test_buckets_run_from_the_last_parameter_and_a_large_gradient_is_alone():
    assert sizes(parameters(1, 1, 9, 2, 2), nbytes=16) == [[2, 2], [9], [1, 1]]


def test_a_bucket_has_one_dtype():
    given = parameters(1) + parameters(1, dtype=torch.bfloat16)
    assert sizes(given, nbytes=16) == [[1], [1]]


def test_gradients_lie_aligned_in_a_length_that_divides():
    given = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    given[1].grad = torch.arange(4.0).view(2, 2)
    (bucket,) = gradient_buckets(given, count=3)
    flat = bucket.flat(torch.device("cpu"))
    assert flat.numel() == bucket.length == 3 * 128
    found = dict(bucket.views(flat))
    assert torch.equal(found[given[1]], given[1].grad)
    # Minus zero, which changes no sum: the first has no gradient.
    assert torch.signbit(found[given[0]]).all()
    assert not found[given[0]].any()
    assert sorted(view.storage_offset() for view in found.values()) == [0, 128]
    (alone,) = gradient_buckets([nn.Parameter(torch.zeros(5))], count=2)
    assert alone.flat(torch.device("cpu")).numel() == alone.length == 256


def test_a_bucket_lies_anywhere_in_memory_and_has_its_gradients_from_there():
    given = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    given[1].grad = torch.arange(4.0).view(2, 2)
    (bucket,) = gradient_buckets(given, count=2)
    memory = torch.full((1000,), 7.0)
    flat = memory[300 : 300 + bucket.length]
    places, gradients = bucket.addends(flat)
    assert all(gradient is parameter.grad for gradient, parameter in zip(gradients, bucket.parameters, strict=True))
    assert torch.signbit(given[0].grad).all()
    assert not given[0].grad.any()
    for place, gradient in zip(places, gradients, strict=True):
        place.copy_(gradient)
    wanted = bucket.flat(torch.device("cpu"))
    assert all(torch.equal(place, other) for place, (_, other) in zip(places, bucket.views(wanted), strict=True))
    assert memory[:300].eq(7).all()
    assert memory[300 + bucket.length :].eq(7).all()
    flat += 1
    bucket.spread(flat)
    assert torch.equal(given[1].grad, torch.arange(4.0).view(2, 2) + 1)
    assert torch.equal(given[0].grad, torch.ones(3))
    (alone,) = gradient_buckets(given[1:], count=2)
    ((place,), _) = alone.addends(memory[8:12])
    assert place.data_ptr() == memory[8:].data_ptr()


def test_a_large_gradient_is_summed_where_it_is():
    weight = nn.Parameter(torch.zeros(4, 8, 2, 2).to(memory_format=torch.channels_last))
    (bucket,) = gradient_buckets([weight], count=2)
    for gradient in (torch.randn(4, 8, 2, 2), torch.randn(4, 8, 2, 2).to(memory_format=torch.channels_last)):
        weight.grad, expected = gradient, 2 * gradient
        flat = bucket.flat(gradient.device)
        assert flat.numel() == bucket.length == weight.numel()
        # In the order of the parameter, which it has on every process; the first is in another and was copied.
        assert torch.equal(flat, gradient.permute(0, 2, 3, 1).reshape(-1))
        assert (flat.data_ptr() == gradient.data_ptr()) == (gradient.stride() == weight.stride())
        flat *= 2
        bucket.spread(flat)
        assert weight.grad is gradient
        assert torch.equal(weight.grad, expected)
    weight.grad = None
    bucket.spread(torch.ones(bucket.length))
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_a_gradient_whose_memory_something_else_holds_is_not_summed_there():
    weight = nn.Parameter(torch.zeros(8))
    weight.grad = torch.ones(8)
    (bucket,) = gradient_buckets([weight], count=2)
    assert not bucket.shares_memory()
    held = weight.grad.view(2, 4)
    assert bucket.shares_memory()
    flat = bucket.flat(held.device, in_place=False)
    flat *= 2
    assert torch.equal(held, torch.ones(2, 4))
    del held
    assert not bucket.shares_memory()


def test_gradients_that_autograd_lays_in_one_place_are_separated():
    first, second, whole = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(4, 3))
    (torch.cat([first.view(2, 3), second.view(2, 3)])[None] + whole[None]).mul(1).mul(1).sum().backward()
    alone = nn.Parameter(torch.zeros(3))
    alone.grad = torch.ones(3)
    kept = alone.grad
    given = [first, second, whole, alone]
    assert len({p.grad.untyped_storage().data_ptr() for p in given}) == 2
    separate_gradients(given)
    for parameter in given:
        parameter.grad += 1
    assert all(torch.equal(parameter.grad, torch.full_like(parameter, 2)) for parameter in given)
    assert alone.grad is kept


def test_the_exchange_takes_two_of_the_largest_bucket():
    assert exchange_bytes(parameters(3, 10_000_000)) == 2 * 4 * 10_000_000
    assert exchange_bytes([]) == 0
