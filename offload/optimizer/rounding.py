"""Rounds float32 to bfloat16: to nearest, exactly with a remainder, or stochastically with noise from a counter.

Weights beside a master are rounded to nearest, ties away from zero. So the float32 master is, as an integer of 32 bits,
65536 times the bfloat16 weight plus a signed remainder of 16 bits, and no pattern is ambiguous. (Ties to even would
leave one: a low half of 0x8000 under an even weight.) The remainders are those of NVIDIA Apex
(`store_param_remainders` of its DistributedFusedAdam).

Noise is a hash of parameter, step and element, so it depends neither on the order of updates nor on how they are cut:
the generator is counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), the hash is Wellons'
lowbias32. The elements of a parameter beyond 2^32 repeat the noise of the first.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

# The halves of an integer of 32 bits, in the order in which memory has them.
LOW, HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)


def round_weights(values: Tensor, weight: Tensor) -> None:
    """Rounds `values` (float32, flat) into `weight`: bfloat16 to nearest, ties away from zero, others as torch does."""
    if weight.dtype != torch.bfloat16:
        weight.copy_(values)
        return
    weight.view(torch.int16).copy_(_halves(values.view(torch.int32) + 0x8000)[HIGH])
    weight.masked_fill_(values.isnan(), float("nan"))


def split(values: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Splits float32 `values` into bfloat16 `weight` and int16 `remainder`; all are flat and of equal length.

    `join` gives the same bits back, but for the payload of a NaN.
    """
    round_weights(values, weight)
    remainder.copy_(_halves(values.view(torch.int32))[LOW])
    remainder.masked_fill_(values.isnan(), 0)


def join(weight: Tensor, remainder: Tensor, values: Tensor) -> Tensor:
    """Writes the float32 number of each bfloat16 `weight` and int16 `remainder` into `values`, and returns that.

    A weight of zero whose remainder is negative was written by somebody else since it was split, and counts as zero:
    the sum would be a NaN.
    """
    high, low = weight.view(torch.int16), remainder
    low = torch.where((high & 0x7FFF) == 0, low.clamp_min(0), low)
    halves = _halves(values.view(torch.int32))
    halves[LOW].copy_(low)
    halves[HIGH].copy_(high + (low >> 15))
    return values


def round_stochastically(values: Tensor, noise: Tensor, rounded: Tensor) -> None:
    """Rounds float32 `values` into bfloat16 `rounded`, up or down with probabilities that make the mean exact.

    `noise` is int32, of which the low 16 bits are used. Infinities and NaN stay.
    """
    sums = values.view(torch.int32) + (noise & 0xFFFF)
    rounded.view(torch.int16).copy_(_halves(sums)[HIGH])
    rounded.masked_fill_(values.isnan(), float("nan"))


def noise_seed(number: int) -> int:
    """Returns the seed of a parameter's noise, an int32; `number` is the parameter's place in its optimizer."""
    return int(_mix(torch.tensor(number, dtype=torch.int32)))


def noise_key(seed: int, step: Tensor) -> Tensor:
    """Returns the key of a step's noise: an int32 scalar on the device of `step`, a scalar of any dtype."""
    return _mix(step.to(torch.int32) ^ seed)


def noise_of(key: Tensor, start: int, count: int) -> Tensor:
    """Returns int32 [count] on the key's device: 32 random bits for each element from `start` on."""
    index = torch.arange(count, dtype=torch.int32, device=key.device).add_(_int32(start))
    return _mix(index.bitwise_xor_(key))


def _mix(bits: Tensor) -> Tensor:
    """Hashes an int32 tensor in place, and returns it. Shifts are logical, products wrap around."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= 0x7FEB352D
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _int32(0x846CA68B)
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def _int32(number: int) -> int:
    """Returns the low 32 bits of `number` as a signed integer."""
    return (number + 0x80000000) % 0x100000000 - 0x80000000


def _halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int16 views of the two halves of flat int32 `bits`, in the order of memory: no cast saturates."""
    pairs = bits.view(torch.int16).view(-1, 2)
    return pairs[:, 0], pairs[:, 1]
