"""The formats in which AdamW holds its states: names, tensors, bytes, and how float32 numbers are rounded to them.

**Weights** beside a master are rounded to nearest, ties away from zero. So the float32 master is, as an integer of 32
bits, 65536 times the bfloat16 weight plus a signed remainder of 16 bits, and no pattern is ambiguous. (Ties to even
would leave one: a low half of 0x8000 under an even weight.) The remainders are those of NVIDIA Apex
(`store_param_remainders` of its DistributedFusedAdam).

**Noise** is a hash of parameter, step and element, so it depends neither on the order of updates nor on how they are
cut: the generator is counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), the hash is
Wellons' lowbias32. The elements of a parameter beyond 2^32 repeat the noise of the first.

**Moments in 8 bits** are blocks of 256 numbers with a float32 scale each, and codes of a dynamic map. Both are those of
bitsandbytes (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"): a code is a place in a sorted table
of 256 numbers between -1 (or 0) and 1, more densely spaced the smaller they are. A number is its block's largest
magnitude times the table's nearest number. Other than there, a second moment above zero never becomes zero: the update
would divide by it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from offload.knobs import one_of

# The tensor beside a bfloat16 weight that makes its master, by `master`.
MASTER_DTYPES = {"compact": torch.int16, "stochastic": None}
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
MOMENTS = ("exp_avg", "exp_avg_sq")
# The name of a state's master tensor, by its dtype.
MASTER_NAMES = {torch.float32: "master", torch.int16: "remainder"}
# torch's AdamW would take codes under the name of a moment for its values.
CODES, SCALE = "{}_codes", "{}_scale"
# The halves of an integer of 32 bits, in the order in which memory has them.
LOW, HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)
# Numbers in 8 bits that share a scale.
BLOCK = 256
EXPONENTS = 7


@dataclass(frozen=True)
class StateFormat:
    """The formats of masters and moments; see `HostAdamW` for the knobs. Raises KnobError for an unknown name."""

    master: str = "compact"
    state_dtype: str = "fp32"

    def __post_init__(self) -> None:
        one_of("master", self.master, *MASTER_DTYPES)
        one_of("state_dtype", self.state_dtype, *STATE_DTYPES)

    @property
    def moment_dtype(self) -> torch.dtype:
        return STATE_DTYPES[self.state_dtype]

    @property
    def moment_names(self) -> tuple[str, str]:
        """The names of the two moments' tensors in a state."""
        first, second = (CODES.format(name) for name in MOMENTS) if self.state_dtype == "int8" else MOMENTS
        return first, second

    def master_dtype(self, weight: torch.dtype) -> torch.dtype | None:
        """Returns the dtype of the master tensor beside weights of dtype `weight`; None if there is none."""
        if weight == torch.float32:
            return None
        # The bits of a float16 number are not the first of a float32 one.
        return MASTER_DTYPES[self.master] if weight == torch.bfloat16 else torch.float32

    def tensors(self, weight: torch.dtype, shape: torch.Size) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Returns dtype and shape of each tensor in the state of a parameter, by name; a copy of it is not counted."""
        found = {"step": (torch.float32, torch.Size())}
        for moment, name in zip(MOMENTS, self.moment_names, strict=True):
            found[name] = (self.moment_dtype, shape)
            if name != moment:
                found[SCALE.format(moment)] = (torch.float32, torch.Size([scales_for(shape.numel())]))
        if (master := self.master_dtype(weight)) is not None:
            found[MASTER_NAMES[master]] = (master, shape)
        return found

    def nbytes(self, weight: torch.dtype, shape: torch.Size) -> int:
        """Returns the bytes of these tensors."""
        return sum(dtype.itemsize * size.numel() for dtype, size in self.tensors(weight, shape).values())

    @property
    def update_bytes(self) -> float:
        """Bytes of memory traffic that an update of a bfloat16 weight with a bfloat16 gradient takes."""
        states = self.nbytes(torch.bfloat16, torch.Size([BLOCK])) - torch.float32.itemsize
        # All are read and written, but the gradient.
        return 2 + 2 * (2 + states / BLOCK)


def needs_copy(parameter: Tensor, format: StateFormat, placed: bool) -> bool:
    """Tells whether a state has a copy of the weight: one that kernels can read, which walk memory on one device.

    Beside a float32 master a weight is not read.
    """
    return (placed or not parameter.is_contiguous()) and format.master_dtype(parameter.dtype) != torch.float32


def state_bytes(parameters: Iterable[Tensor], format: StateFormat = StateFormat(), placed: bool = False) -> int:
    """Returns the bytes of states beside those of `parameters`, each counted once, that train; meta ones will do.

    `placed`: on a device, as `States.place` puts them there.
    """
    total = 0
    for parameter in dict.fromkeys(parameters):
        if parameter.requires_grad:
            total += format.nbytes(parameter.dtype, parameter.shape)
            total += parameter.nbytes if needs_copy(parameter, format, placed) else 0
    return total


# Numbers of 16 bits.


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

    A zero with a negative remainder was written by somebody else, and counts as zero: the sum would be a NaN.
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


# Numbers of 8 bits.


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
