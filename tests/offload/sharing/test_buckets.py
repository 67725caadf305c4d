"""Gradients are cut into buckets."""

import torch
from torch import nn

from offload.sharing import gradient_buckets, separate_gradients
from training.parallel.reduce import exchange_bytes


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
