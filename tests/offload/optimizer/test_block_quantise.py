"""Moments in 8 bits: the map of bitsandbytes, errors within their bounds, and rounding at random."""

from __future__ import annotations

import pytest
import torch

from offload.optimizer.block_quantise import (
    BLOCK,
    SIGNED_ERROR,
    UNSIGNED_ERROR,
    dequantise,
    dynamic_map,
    midpoints,
    quantise,
    scales_for,
)

SIGNS = pytest.mark.parametrize("signed", [True, False])


def numbers(count: int, signed: bool) -> torch.Tensor:
    """Numbers over many orders of magnitude."""
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator) * 10 ** (8 * torch.rand(count, generator=generator) - 8)
    return values if signed else values.abs()


def there_and_back(values: torch.Tensor, signed: bool) -> torch.Tensor:
    codes = torch.empty(values.shape, dtype=torch.uint8)
    scales = torch.empty(scales_for(values.numel()))
    quantise(values, codes, scales, signed)
    return dequantise(codes, scales, signed, torch.empty_like(values))


@SIGNS
def test_the_map_is_that_of_bitsandbytes(signed: bool):
    theirs = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(dynamic_map(signed), theirs.create_dynamic_map(signed))


@SIGNS
@pytest.mark.parametrize("count", [1, BLOCK, 10 * BLOCK + 17])
def test_errors_are_within_the_bound(signed: bool, count: int):
    values = numbers(count, signed)
    error = (there_and_back(values, signed) - values).abs()
    largest = torch.stack([block.abs().max() for block in values.split(BLOCK)]).repeat_interleave(BLOCK)[:count]
    assert (error <= (SIGNED_ERROR if signed else UNSIGNED_ERROR) * largest).all()


@SIGNS
def test_each_entry_of_the_map_is_exact(signed: bool):
    # One is in the map, so the scale is the factor.
    values = dynamic_map(signed) * 2.0**-20
    assert torch.equal(there_and_back(values, signed)[1:], values[1:])


def test_a_second_moment_above_zero_stays_above_zero():
    values = torch.tensor([1.0, 1e-12, 0.0, 1e-30])
    back = there_and_back(values, signed=False)
    assert torch.equal(back > 0, values > 0)


@SIGNS
def test_zeros_stay_zero(signed: bool):
    assert torch.equal(there_and_back(torch.zeros(300), signed), torch.zeros(300))


@SIGNS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen_in_its_block_and_no_other(signed: bool, bad: float):
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 3] = bad
    back = there_and_back(values, signed)
    assert back[BLOCK : 2 * BLOCK].isnan().all()
    assert torch.equal(back[:BLOCK], values[:BLOCK])
    assert torch.equal(back[2 * BLOCK :], values[2 * BLOCK :])


@SIGNS
def test_midpoints_lie_between_the_entries(signed: bool):
    table = dynamic_map(signed)
    assert ((table[:-1] < midpoints(signed)) & (midpoints(signed) < table[1:])).all()
