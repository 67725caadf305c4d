"""Both forms of the C loop find the codes of the torch kernel: at every boundary, for blocks of every size and length.

The form with gathers is compiled beside the one that the processor would get, which may be the same.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from offload.optimizer.block_quantise import BLOCK, dynamic_map, midpoints
from offload.optimizer.formats import StateFormat
from offload.optimizer.kernels import FusedUpdate
from offload.optimizer.native_codes import FIRST_PLACE, GUESS_BEGINS, MAP_SIZE, PLACES, guesses, vector_tables
from offload.optimizer.native_kernel import NativeUpdate, native_library
from tests.offload.helpers.kernels import SETTINGS, needs_compiler, operands

FORMATS = [StateFormat("kahan", "int8"), StateFormat("compact", "int8", "stochastic")]
FORMS = {"the processor's form": (), "the general form": ("-DPLAIN_CODES",)}
EVERY = [
    needs_compiler,
    pytest.mark.parametrize("format", FORMATS, ids=str),
    pytest.mark.parametrize("form", FORMS),
]
# The moments after an update are the gradient and its square.
COPIES = SETTINGS._replace(beta1=0.0, beta2=0.0)


def every(test):
    for mark in EVERY:
        test = mark(test)
    return test


def neighbours(values: torch.Tensor, distance: int) -> torch.Tensor:
    """These positive numbers and as many floats below and above each as `distance` says."""
    bits = values.view(torch.int32)[:, None] + torch.arange(-distance, distance + 1, dtype=torch.int32)
    return bits.clamp(min=0).view(torch.float32).flatten()


def boundaries() -> torch.Tensor:
    """The magnitudes at which a code begins, and those that have a code of their own, of both maps."""
    found = torch.cat([midpoints(True), midpoints(False), dynamic_map(True), dynamic_map(False)])
    return found[found > 0].unique()


def blocks_of(numbers: torch.Tensor, largest: float) -> torch.Tensor:
    """Blocks of 256 numbers with `largest` as the first of each."""
    parts = numbers.split(BLOCK - 1)
    full = [torch.cat([torch.tensor([largest]), part]) for part in parts]
    return torch.cat(full)


def assert_codes_agree(form: str, format: StateFormat, gradient: torch.Tensor, start: int = 0, steps: int = 1) -> None:
    found = []
    for kernel in (FusedUpdate(), NativeUpdate(native_library(format, definitions=FORMS[form]), threads=2)):
        on = dataclasses.replace(operands(len(gradient), format), gradient=gradient, start=start)
        for step in range(1, steps + 1):
            kernel(on, torch.tensor(float(step)), COPIES)
        found.append(on)
    one, other = found
    for name in ("exp_avg_scale", "exp_avg_sq_scale"):
        torch.testing.assert_close(getattr(other, name), getattr(one, name), rtol=0, atol=0, equal_nan=True)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(other, name), getattr(one, name)), name


# Both sides of where the general form takes a block over, halves of odd numbers, the smallest and the largest numbers.
LARGEST = [1.0, 0.7, 1.5, 2.0**-60, 2.0**-60 * 0.999, 2.0**20, 2.0**20 * 1.001, 3e-20, 0.1234567, 7e-39, 1e-44, 3e38]


@every
@pytest.mark.parametrize("largest", LARGEST)
@pytest.mark.sampled
def test_every_boundary_and_its_neighbours(form: str, format: StateFormat, largest: float):
    """First moments are the boundaries times the largest, and their neighbours; second ones are near them."""
    edges = neighbours(boundaries() * largest, 3)
    edges = edges[edges <= largest]
    signed = blocks_of(torch.cat([edges, -edges]), largest)
    roots = neighbours((boundaries().double() * largest).sqrt().float(), 3)
    unsigned = blocks_of(roots[roots.double() ** 2 < largest], largest**0.5)
    for gradient in (signed, -signed, unsigned):
        assert_codes_agree(form, format, gradient)


@every
def test_quotients_of_many_divisors(form: str, format: StateFormat):
    """Where a quotient would come out one unit wrong, numbers beside a boundary would get another code."""
    generator = torch.Generator().manual_seed(5)
    edges = boundaries()
    chosen = edges[torch.randint(len(edges), (2000, BLOCK - 1), generator=generator)]
    largest = torch.rand(2000, 1, generator=generator) * 2.0 ** torch.randint(-50, 20, (2000, 1), generator=generator)
    numbers = (chosen * largest).view(torch.int32) + torch.randint(-1, 2, chosen.shape, generator=generator).int()
    numbers = torch.minimum(numbers.view(torch.float32), largest)
    signs = torch.randint(0, 2, chosen.shape, generator=generator) * 2.0 - 1
    assert_codes_agree(form, format, torch.cat([largest, numbers * signs], dim=1).flatten())
    assert_codes_agree(form, format, torch.cat([largest, numbers], dim=1).sqrt().flatten())


@every
@pytest.mark.parametrize("largest", [0.0, 1e-44, 1.0, 2.0**19, 2.0**21, 2.0**59, 3e38])
@pytest.mark.sampled
def test_zeros_and_the_smallest_numbers(form: str, format: StateFormat, largest: float):
    """Both zeros, denormals, and quotients that are too small for a float. Noise of zero is among the draws."""
    bits = torch.cat([torch.arange(0, 60), torch.tensor([0x7FFFFF, 0x800000, 0x800001])]).int()
    small, zeros = bits.view(torch.float32).repeat(8000), torch.zeros(BLOCK)
    for part in (small, small.sqrt()):
        assert_codes_agree(form, format, torch.cat([zeros, -zeros, blocks_of(torch.cat([part, -part]), largest)]))


@every
@pytest.mark.parametrize("count", [1, 15, 16, 63, 64, 65, 127, 255, 257, 70_001])
def test_blocks_that_are_not_full(form: str, format: StateFormat, count: int):
    """Nothing beyond the end is written, and what was read there leaves no trace."""
    generator = torch.Generator().manual_seed(count)
    gradient = torch.randn(count, generator=generator) * 10 ** (4 * torch.rand(count, generator=generator) - 4)
    assert_codes_agree(form, format, gradient, start=1 << 20, steps=3)
    on = operands(BLOCK * 300, format)
    on.exp_avg.fill_(77), on.exp_avg_sq.fill_(78)
    part = next(iter(on.split(BLOCK * 299)))
    part = dataclasses.replace(
        part,
        gradient=gradient,
        **{name: getattr(part, name)[:count] for name in ("weight", "master", "exp_avg", "exp_avg_sq")},
    )
    NativeUpdate(native_library(format, definitions=FORMS[form]), threads=1)(part, torch.ones(()), COPIES)
    assert (on.exp_avg[count:] == 77).all()
    assert (on.exp_avg_sq[count:] == 78).all()


@every
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_block_wherever_it_is(form: str, format: StateFormat, bad: float):
    gradient = torch.randn(BLOCK * BLOCK // 2, generator=torch.Generator().manual_seed(3))
    # In every other block, at another place each.
    for block, place in enumerate(range(0, BLOCK, 4)):
        gradient[2 * block * BLOCK + place] = bad
    assert_codes_agree(form, format, gradient)


@pytest.mark.parametrize(("signed", "rounds_moments"), list(itertools.product([True, False], repeat=2)))
def test_a_guess_is_right_or_one_too_small(signed: bool, rounds_moments: bool):
    """For the first and the last number of each place, and every boundary and its neighbours."""
    tables = vector_tables(signed, rounds_moments).int()
    beginning, slope = 256 * tables[4] + GUESS_BEGINS, tables[5]
    bits = tables[6] + (tables[7] << 8) + (tables[8] << 16) + (tables[9] << 24)
    edges = bits[bits != 0x7FFFFFFF].view(torch.float32) * 2.0**-64
    places = torch.arange(FIRST_PLACE << 16, 0x3F800001, 1 << 16, dtype=torch.int64).int()
    numbers = torch.cat([torch.zeros(1), places.view(torch.float32), (places[:-1] | 0xFFFF).view(torch.float32)])
    numbers = torch.cat([numbers, neighbours(edges[edges > 0], 2)])
    numbers = numbers[numbers <= 1]
    place = (numbers.view(torch.int32) >> 16).sub(FIRST_PLACE).clamp(min=0)
    guess = (beginning[place // PLACES] + slope[place // PLACES] * (place % PLACES)) >> 8
    for below in (torch.bucketize(numbers, edges), torch.bucketize(numbers, edges, right=True)):
        # The boundary above a guess is looked up among as many as the table has.
        assert (guess < (128 if signed else MAP_SIZE)).all()
        assert ((below - guess == 0) | (below - guess == 1)).all()


@pytest.mark.parametrize(("signed", "rounds_moments"), list(itertools.product([True, False], repeat=2)))
def test_no_boundary_ends_in_ones(signed: bool, rounds_moments: bool):
    """Adding one to the lower half of a number, which saturates, then tells whether it reaches the boundary."""
    tables = vector_tables(signed, rounds_moments).int()
    is_stored = tables[9] != 0x7F
    assert ((tables[6] + (tables[7] << 8))[is_stored] != 0xFFFF).all()


def test_boundaries_that_no_line_follows_are_refused():
    with pytest.raises(ValueError, match="no line guesses the codes of bin"):
        guesses(torch.tensor([0.5, 0.5000001, 0.5000002, 0.5000003]), last=4)
