"""Sums over processes that are forked from this one: it costs no imports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.training.parallel.conftest import forked
from training.errors import UserError
from training.parallel.reduce import (
    SUMS,
    SUMS_IN_SLICES,
    SUMS_OF_HOSTS,
    SUMS_OF_HOSTS_IN_SLICES,
    reduce_gradients,
)
from training.parallel.sharers import HostGroups


def gradients(rank: int) -> list[Tensor | None]:
    """Returns the gradients of a rank: of any order of magnitude, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(rank)
    shapes = ((7, 3), (), (5,), (2, 3, 4, 4), (4,))
    found = [
        torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator) for shape in shapes
    ]
    # Nobody has one of the last parameter, and the last rank has none of the third.
    return [*found[:2], None if rank == 2 else found[2], found[3].contiguous(memory_format=torch.channels_last), None]


def model(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros((7, 3), dtype=dtype)), nn.Parameter(torch.zeros((), dtype=dtype)),
            nn.Parameter(torch.zeros(5, dtype=dtype)),
            nn.Parameter(torch.zeros((2, 3, 4, 4), dtype=dtype).contiguous(memory_format=torch.channels_last)),
            nn.Parameter(torch.zeros(4, dtype=dtype))]  # fmt: skip


def with_gradients(rank: int, dtype: torch.dtype) -> list[nn.Parameter]:
    parameters = model(dtype)
    for parameter, gradient in zip(parameters, gradients(rank), strict=True):
        parameter.grad = None if gradient is None else gradient.to(dtype)
    return parameters


def reduced(rank: int, folder: Path, count: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    results = {}
    for name, add in SUMS.items():
        for dtype in (torch.float32, torch.bfloat16):
            parameters = with_gradients(rank, dtype)
            reduce_gradients(parameters, [True] * 4 + [False], torch.device("cpu"), dist.group.WORLD, add)
            results[name, dtype] = [parameter.grad for parameter in parameters]
    for ways in (SUMS, SUMS_IN_SLICES):
        for name, add in ways.items():
            for dtype in (torch.float32, torch.bfloat16, torch.int32):
                given = flat_gradient(rank, 24 * count).to(dtype)
                results["flat", ways is SUMS, name, dtype] = add(given, dist.group.WORLD).chunk(count)[rank].clone()
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 3])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The reduced gradients of two and of three ranks, by way of adding and dtype."""
    return forked(reduced, tmp_path_factory.mktemp("reduced"), request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ordered_sums_are_those_of_autograd_over_microbatches(results, dtype: torch.dtype):
    parameters = model(dtype)
    for rank in range(len(results)):
        for parameter, gradient in zip(parameters, gradients(rank), strict=True):
            if gradient is not None:
                parameter.backward(gradient.to(dtype))
    for found in results:
        for parameter, gradient in zip(parameters, found["ordered", dtype], strict=True):
            assert (parameter.grad is None) == (gradient is None)
            assert gradient is None or (
                torch.equal(gradient, parameter.grad) and gradient.stride() == parameter.stride()
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_sums_are_the_same_on_all_ranks_and_near_the_ordered_ones(results, dtype: torch.dtype):
    for rank, found in enumerate(results):
        for gradient, first, ordered in zip(
            found["fast", dtype], results[0]["fast", dtype], results[0]["ordered", dtype], strict=True
        ):
            assert gradient is None or torch.equal(gradient, first), rank
            if gradient is not None:
                torch.testing.assert_close(gradient, ordered, rtol=0.02, atol=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("name", SUMS)
def test_a_slice_of_a_sum_has_the_bits_of_the_whole_one(results, name: str, dtype: torch.dtype):
    for found in results:
        whole, sliced = (found["flat", is_whole, name, dtype] for is_whole in (True, False))
        assert whole.any()
        if name == "ordered" or len(results) == 2:
            assert torch.equal(whole, sliced)
        else:
            # The library may add in another order.
            torch.testing.assert_close(whole, sliced, rtol=0.02, atol=0.5)


def summed_patterns(rank: int, folder: Path, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), count), rank=rank, world_size=count)
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        own = patterns(rank, dtype)
        found[dtype] = SUMS["ordered"](own.clone(), dist.group.WORLD)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def patterns(rank: int, dtype: torch.dtype) -> Tensor:
    """All patterns of 16 bits, in another order for each rank."""
    order = torch.randperm(2**16, generator=torch.Generator().manual_seed(rank))
    return (order - 2**15).to(torch.int16).view(dtype)


def test_a_sum_of_two_ranks_rounds_as_torch_does_for_all_kinds_of_numbers(tmp_path: Path):
    for found in forked(summed_patterns, tmp_path, 2):
        for dtype, total in found.items():
            assert_sum_of_patterns(total, dtype)


def assert_sum_of_patterns(total: Tensor, dtype: torch.dtype) -> None:
    """Compares what two ranks have summed with torch's sum, on the CPU."""
    expected = patterns(0, dtype) + patterns(1, dtype)
    assert torch.equal(total.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(total.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])


# The hosts of six ranks, in their order; the middle one takes sums of others, and gives them on.
HOSTS = (0, 0, 1, 1, 2, 2)


def flat_gradient(rank: int, size: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator) * 10 ** torch.randn(size, generator=generator)


def summed_over_hosts(rank: int, folder: Path, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), count), rank=rank, world_size=count)
    groups = HostGroups.of(rank, HOSTS, dist.new_group, dist.new_group)
    assert groups.ranks == (rank // 2 * 2, rank // 2 * 2 + 1)
    results = {
        name: add(flat_gradient(rank), groups.data, groups.across).clone() for name, add in SUMS_OF_HOSTS.items()
    }
    for name, add in SUMS_OF_HOSTS_IN_SLICES.items():
        results[name, "slice"] = add(flat_gradient(rank), groups.data, groups.across).chunk(2)[rank % 2].clone()
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_sums_over_hosts_are_in_the_order_of_the_ranks(tmp_path: Path):
    expected = flat_gradient(0)
    for rank in range(1, 6):
        expected += flat_gradient(rank)
    found = forked(summed_over_hosts, tmp_path, 6)
    for rank, results in enumerate(found):
        for name in SUMS_OF_HOSTS:
            assert torch.equal(results[name, "slice"], results[name].chunk(2)[rank % 2])
        assert torch.equal(results["ordered"], expected)
        assert torch.equal(results["fast"], found[0]["fast"])
        torch.testing.assert_close(results["fast"], expected, rtol=1e-4, atol=1e-3)
    # Sums of hosts that are added would be others: else this test could not fail.
    host_by_host = sum(flat_gradient(rank) + flat_gradient(rank + 1) for rank in (0, 2, 4))
    assert not torch.equal(host_by_host, expected)


@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1, 0, 1)], ids=str)
def test_hosts_with_other_numbers_of_ranks_or_another_order_are_refused(hosts: tuple[int, ...]):
    with pytest.raises(UserError, match=r"^parallel.homes=shared: the hosts of the ranks are 0, .* parallel.homes=own"):
        HostGroups.of(0, hosts, None, None)


@pytest.mark.parametrize("results", [3], indirect=True)
def test_the_order_shows_in_these_gradients(results):
    """Else the first test could not fail."""
    a, b, c = (next(g for g in gradients(rank) if g is not None) for rank in range(3))
    assert not torch.equal((a + b) + c, a + (b + c))
    assert torch.equal((a + b) + c, results[0]["ordered", torch.float32][0])
