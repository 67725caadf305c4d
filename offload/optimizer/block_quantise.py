"""Moments in 8 bits: blocks of 256 numbers with a float32 scale each, codes of a dynamic map (Dettmers et al. 2022).

The map and the blocks are those of bitsandbytes ("8-bit Optimizers via Block-wise Quantization"): a code is a place in
a sorted table of 256 numbers between -1 (or 0) and 1, more densely spaced the smaller they are. A number is its block's
largest magnitude times the table's nearest number. Other than there, a second moment above zero never becomes zero: the
update would divide by it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
# Largest error of a number relative to its block's largest: half the widest distance of two entries of the map.
SIGNED_ERROR, UNSIGNED_ERROR = 0.0071, 0.0036
EXPONENTS = 7


@functools.cache
def dynamic_map(signed: bool) -> Tensor:
    """Returns the table: float32 [256], ascending, with 0 and 1 in it."""
    values = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        edges = torch.linspace(0.1, 1, (1 if signed else 2) * 2**exponent + 1, dtype=torch.float32)
        positive = (10.0 ** (exponent - EXPONENTS + 1) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += positive + [-value for value in positive] * signed
    return torch.tensor(sorted(values), dtype=torch.float32)


@functools.cache
def midpoints(signed: bool) -> Tensor:
    """Returns float32 [255]: above the midpoint of two entries of the map the upper is nearer."""
    table = dynamic_map(signed)
    return (table[:-1] + table[1:]) / 2


def scales_for(count: int) -> int:
    """Returns how many scales `count` numbers have."""
    return -(-count // BLOCK)


def dequantise(codes: Tensor, scales: Tensor, signed: bool, values: Tensor) -> Tensor:
    """Writes the numbers of `codes` (uint8, flat) into `values` (float32), and returns that.

    `scales` are float32, one for each block; the first block begins at the first code.
    """
    torch.mul(_on(codes.device, dynamic_map, signed)[codes.int()], _each(scales, codes.numel()), out=values)
    return values


def quantise(values: Tensor, codes: Tensor, scales: Tensor, signed: bool) -> None:
    """Writes codes and scales of `values` (float32, flat): the nearest entry of the map.

    A NaN or an infinity makes its whole block NaN.
    """
    count, device = values.numel(), values.device
    blocks = F.pad(values, (0, -count % BLOCK)).view(-1, BLOCK)
    torch.amax(blocks.abs(), dim=1, out=scales)
    # An infinity times the map's entries would be infinite for some codes and a NaN for others.
    scales.masked_fill_(scales.isinf(), torch.nan)
    # 0 / 0 is no number.
    relative = values / _each(torch.where(scales > 0, scales, 1.0), count)
    found = torch.bucketize(relative, _on(device, midpoints, signed), out_int32=True)
    if not signed:
        found = torch.maximum(found, (values > 0).int())
    codes.copy_(found)


@functools.cache
def _on(device: torch.device, table, signed: bool) -> Tensor:
    return table(signed).to(device)


def _each(scales: Tensor, count: int) -> Tensor:
    return scales.repeat_interleave(BLOCK)[:count]
