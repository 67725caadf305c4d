"""Sums over processes that are forked from this one: it costs no imports."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.training.parallel.conftest import exchanged
from training.errors import UserError
from training.parallel.reduce import ordered_sum, ordered_sum_of_hosts, reduce_gradients
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


def reduced(rank: int) -> dict[torch.dtype, list[Tensor | None]]:
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        parameters = with_gradients(rank, dtype)
        reduce_gradients(parameters, [True] * 4 + [False], torch.device("cpu"), dist.group.WORLD)
        results[dtype] = [parameter.grad for parameter in parameters]
    return results


@pytest.fixture(scope="module", params=[2, 3])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The reduced gradients of two and of three ranks, by dtype."""
    return exchanged(reduced, tmp_path_factory.mktemp("reduced"), request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ordered_sums_are_those_of_autograd_over_microbatches(results, dtype: torch.dtype):
    parameters = model(dtype)
    for rank in range(len(results)):
        for parameter, gradient in zip(parameters, gradients(rank), strict=True):
            if gradient is not None:
                parameter.backward(gradient.to(dtype))
    for found in results:
        for parameter, gradient in zip(parameters, found[dtype], strict=True):
            assert (parameter.grad is None) == (gradient is None)
            assert gradient is None or (
                torch.equal(gradient, parameter.grad) and gradient.stride() == parameter.stride()
            )


def summed_patterns(rank: int) -> dict[torch.dtype, Tensor]:
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        found[dtype] = patterns(rank, dtype)
        ordered_sum(found[dtype], dist.group.WORLD)
    return found


def patterns(rank: int, dtype: torch.dtype) -> Tensor:
    """All patterns of 16 bits, in another order for each rank."""
    order = torch.randperm(2**16, generator=torch.Generator().manual_seed(rank))
    return (order - 2**15).to(torch.int16).view(dtype)


def test_a_sum_of_two_ranks_rounds_as_torch_does_for_all_kinds_of_numbers(tmp_path: Path):
    for found in exchanged(summed_patterns, tmp_path, 2):
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


def flat_gradient(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(64, generator=generator) * 10 ** torch.randn(64, generator=generator)


def summed_over_hosts(rank: int) -> Tensor:
    groups = HostGroups.of(rank, HOSTS, dist.new_group, dist.new_group)
    assert groups.ranks == (rank // 2 * 2, rank // 2 * 2 + 1)
    flat = flat_gradient(rank)
    ordered_sum_of_hosts(flat, groups.data, groups.across)
    return flat


def test_sums_over_hosts_are_in_the_order_of_the_ranks(tmp_path: Path):
    expected = flat_gradient(0)
    for rank in range(1, 6):
        expected += flat_gradient(rank)
    assert all(torch.equal(found, expected) for found in exchanged(summed_over_hosts, tmp_path, 6))
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
    assert torch.equal((a + b) + c, results[0][torch.float32][0])
