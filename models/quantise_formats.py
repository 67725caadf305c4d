"""The formats of quantised weights: which tensors they are, and how a matrix becomes these and is made of them again.

The numbers of a format are those of a library, torchao or bitsandbytes. Their functions make several tensors of the
size of the matrix; here a matrix is quantised in pieces that fit in the caches of the cores, several times as fast, to
the same bits whatever the number of threads.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from models.quiet_imports import without_remarks

BITSANDBYTES = "bitsandbytes==0.50.2"

# Elements that a thread quantises at once: float32 copies of them fit in its share of the caches.
PIECE_ELEMENTS_PER_THREAD = 2**17
# Elements that a GPU quantises at once, enough to keep it busy, and more memory than it takes for them.
GPU_PIECE_ELEMENTS = 2**24
GPU_WORK_BYTES = 64 * GPU_PIECE_ELEMENTS
# bitsandbytes' kernels for GPUs count elements in 32 bits: of a larger tensor they would leave a part as it was.
KERNEL_ELEMENTS = 2**31 - 1
# The most bits of numbers for exact sums, and those of an int64 in which a sum fits.
SUMMAND_BITS, SUM_BITS = 38, 63


@dataclass(frozen=True)
class Format(ABC):
    """A way to hold a matrix in few bits. Equal formats of equal arguments give equal bits.

    A matrix has the shape [..., rows, columns]: in front may be the number of experts.
    """

    name: ClassVar[str]
    # The package that pip installs for it; None where torch is enough.
    package: ClassVar[str | None] = None

    @abstractmethod
    def tensors(self, shape: torch.Size) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns shape and dtype of each tensor for a matrix of `shape`."""

    @abstractmethod
    def write(self, matrix: Tensor, inner: Mapping[str, Tensor]) -> None:
        """Writes the tensors for a matrix into `inner`, both on any device: the same bits on each."""

    @abstractmethod
    def dequantise(self, inner: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns the matrix, of `shape` and `dtype`, that the tensors stand for, on their device."""

    def part(self, inner: Mapping[str, Tensor], shape: torch.Size, index: int) -> dict[str, Tensor] | None:
        """Returns views of the tensors for matrix `index` of those of `shape`; None where they cannot be cut so."""
        return None

    def quantise(self, matrix: Tensor) -> dict[str, Tensor]:
        """Returns the tensors for a matrix, on its device."""
        inner = self.empty(matrix.shape, matrix.device)
        self.write(matrix, inner)
        return inner

    def empty(self, shape: torch.Size, device: torch.device) -> dict[str, Tensor]:
        """Returns tensors without values, for a matrix of `shape`."""
        kinds = self.tensors(shape).items()
        return {name: torch.empty(inner, dtype=dtype, device=device) for name, (inner, dtype) in kinds}

    def check_package(self) -> None:
        """Raises ValueError in one line if the package is missing."""
        package = self.package and self.package.partition("=")[0]
        if package and importlib.util.find_spec(package) is None:
            raise ValueError(f"{package} is missing: pip install {self.package}")


class RowFormat(Format):
    """A format in which no row depends on another."""

    def write(self, matrix, inner):
        rows = matrix.reshape(-1, matrix.shape[-1])
        inner = {name: tensor.flatten(0, matrix.ndim - 2) for name, tensor in inner.items()}
        for piece in _pieces(len(rows), rows.shape[1], rows.device):
            for name, made in self.quantised_rows(rows[piece]).items():
                # Converted where it is made: copy_ from a GPU would convert on the CPU.
                inner[name][piece].copy_(made.to(inner[name].dtype))

    def part(self, inner, shape, index):
        return {name: tensor[index] for name, tensor in inner.items()}

    @abstractmethod
    def quantised_rows(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns the values of each tensor for a few rows; dtypes may be others than the tensors'."""


@dataclass(frozen=True)
class Int8(RowFormat):
    """Whole numbers from -128 to 127 and a float32 scale for each row (torchao's Int8WeightOnlyConfig)."""

    name = "int8"

    def tensors(self, shape):
        return {"qdata": (tuple(shape), torch.int8), "scale": ((*shape[:-1], 1), torch.float32)}

    def quantised_rows(self, rows):
        largest = torch.maximum(-rows.amin(1, keepdim=True), rows.amax(1, keepdim=True))
        # In the dtype of the weight, as torchao does.
        scale = _divided(largest, 127.5).clamp_(min=torch.finfo(torch.float32).eps).float()
        return {"qdata": torch.mul(rows, 1.0 / scale).round_().clamp_(-128, 127), "scale": scale}

    def dequantise(self, inner, shape, dtype):
        return (inner["qdata"] * inner["scale"]).to(dtype)


@dataclass(frozen=True)
class Float8(RowFormat):
    """Float8 (e4m3) and a float32 scale for each row (torchao's Float8WeightOnlyConfig)."""

    name = "float8"

    def tensors(self, shape):
        return {"qdata": (tuple(shape), torch.float8_e4m3fn), "scale": ((*shape[:-1], 1), torch.float32)}

    def quantised_rows(self, rows):
        most = torch.finfo(torch.float8_e4m3fn).max
        largest = torch.maximum(-rows.amin(1, keepdim=True), rows.amax(1, keepdim=True))
        scale = _divided(largest, most).float()
        # torchao divides a row of zeros by zero, which gives NaN.
        scale.masked_fill_(scale == 0, 1.0)
        return {"qdata": torch.div(rows, scale).clamp_(-most, most), "scale": scale}

    def dequantise(self, inner, shape, dtype):
        return (inner["qdata"].to(torch.float32) * inner["scale"]).to(dtype)


@dataclass(frozen=True)
class Int4(RowFormat):
    """Whole numbers from 0 to 15, two in a byte, with a float32 scale and a zero point for each group in a row.

    The numbers are those of torchao's affine quantisation. It has no such weight that computes on CPU and GPU.

    Attributes:
        group: columns that share a scale.
    """

    group: int = 64

    name = "int4"

    def __post_init__(self) -> None:
        if self.group < 2 or self.group % 2:
            raise ValueError(f"group={self.group}: must be even and at least 2, because two columns share a byte")

    def tensors(self, shape):
        *leading, columns = shape
        # The last group of a row is filled up with zeros.
        groups = (*leading, -(-columns // self.group), 1)
        packed = (*leading, groups[-2] * self.group // 2)
        return {"qdata": (packed, torch.uint8), "scale": (groups, torch.float32), "zero": (groups, torch.uint8)}

    def quantised_rows(self, rows):
        rows = F.pad(rows.to(torch.float32), (0, -rows.shape[1] % self.group)).view(len(rows), -1, self.group)
        low = rows.amin(2, keepdim=True).clamp_(max=0.0)
        scale = _divided(rows.amax(2, keepdim=True).clamp_(min=0.0) - low, 15.0)
        scale.clamp_(min=torch.finfo(torch.float32).smallest_normal)
        zero = (0 - torch.round(low / scale)).clamp_(0, 15)
        numbers = torch.mul(rows, 1.0 / scale).round_().add_(zero).clamp_(0, 15).to(torch.uint8).flatten(1)
        return {"qdata": (numbers[:, 1::2] << 4).bitwise_or_(numbers[:, 0::2]), "scale": scale, "zero": zero}

    def dequantise(self, inner, shape, dtype):
        packed, zero = inner["qdata"], inner["zero"]
        numbers = torch.stack([packed & 15, packed >> 4], dim=-1).view(*packed.shape[:-1], -1, self.group)
        # Differences of numbers from 0 to 15 fit in int8.
        matrix = ((numbers.view(torch.int8) - zero.view(torch.int8)) * inner["scale"]).to(dtype)
        return matrix.flatten(-2)[..., : shape[-1]]


@dataclass(frozen=True)
class Nf4(Format):
    """The 16 values of NormalFloat, two in a byte, with a scale for 64 elements each (QLoRA, Dettmers et al. 2023).

    The numbers are those of bitsandbytes, but for the last bit of `offset`: its mean depends on the number of threads.

    Attributes:
        double: the scales are quantised too, in eight bits.
    """

    double: bool = True

    name = "nf4"
    package = BITSANDBYTES
    BLOCK: ClassVar[int] = 64
    SCALES_BLOCK: ClassVar[int] = 256

    def tensors(self, shape):
        numel = shape.numel()
        blocks = -(-numel // self.BLOCK)
        kinds = {
            "qdata": ((-(-numel // 2), 1), torch.uint8),
            "code": ((16,), torch.float32),
            "absmax": ((blocks,), torch.uint8 if self.double else torch.float32),
        }
        if self.double:
            kinds |= {
                "offset": ((), torch.float32),
                "nested_absmax": ((-(-blocks // self.SCALES_BLOCK),), torch.float32),
                "nested_code": ((256,), torch.float32),
            }
        return kinds

    def write(self, matrix, inner):
        library = _imported(self, "functional")
        code, nearest = _nearest_nf4(library, matrix.device)
        flat = matrix.reshape(-1)
        # On the CPU, which sums scales and quantises them.
        largest = torch.empty(-(-len(flat) // self.BLOCK))
        for piece in _pieces(len(flat), 1, matrix.device, multiple=self.BLOCK):
            # Zeros after the last element change no scale.
            values = F.pad(flat[piece].float(), (0, (piece.start - piece.stop) % self.BLOCK)).view(-1, self.BLOCK)
            scale = values.abs().amax(1)
            largest[piece.start // self.BLOCK :][: len(scale)] = scale
            scaled = values * (1.0 / scale.clamp_(min=1e-38)).unsqueeze(1)
            # A block with NaN or infinity has such a scale, and any numbers.
            numbers = nearest.numbers(scaled.nan_to_num_(0.0).clamp_(-1, 1)).view(-1)
            packed = (numbers[0::2] << 4).bitwise_or_(numbers[1::2])
            place = inner["qdata"][piece.start // 2 :][: len(packed)]
            place.copy_(packed[: len(place), None])
        inner["code"].copy_(code)
        if not self.double:
            inner["absmax"].copy_(largest)
            return
        offset = _exact_mean(largest)
        absmax, state = library.quantize_blockwise(largest - offset, blocksize=self.SCALES_BLOCK)
        made = {"absmax": absmax, "offset": offset, "nested_absmax": state.absmax, "nested_code": state.code}
        for name, tensor in made.items():
            inner[name].copy_(tensor)

    def part(self, inner, shape, index):
        numel = shape[1:].numel()
        if numel % (self.BLOCK * (self.SCALES_BLOCK if self.double else 1)):
            return None
        sizes = {"qdata": 2, "absmax": self.BLOCK, "nested_absmax": self.BLOCK * self.SCALES_BLOCK}

        def cut(name: str, tensor: Tensor) -> Tensor:
            count = numel // sizes[name] if name in sizes else 0
            return tensor[index * count : (index + 1) * count] if count else tensor

        return {name: cut(name, tensor) for name, tensor in inner.items()}

    def dequantise(self, inner, shape, dtype):
        if inner["qdata"].is_meta:
            # A plan needs the bytes that are read and written: each byte is read once, for two numbers.
            numbers = inner["qdata"].expand(-1, 2).to(dtype, memory_format=torch.contiguous_format)
            return numbers.view(-1)[: shape.numel()].view(shape)
        _imported(self, "functional")
        if shape.numel() > KERNEL_ELEMENTS:
            return self._dequantised_by_parts(inner, shape, dtype)
        # The operations of its `dequantize_4bit`, without the state that it would read them from.
        operations = torch.ops.bitsandbytes
        absmax = inner["absmax"]
        if self.double:
            scales = inner["nested_absmax"], inner["nested_code"], self.SCALES_BLOCK, torch.float32
            absmax = operations.dequantize_blockwise.default(absmax, *scales).add_(inner["offset"])
        return operations.dequantize_4bit.default(inner["qdata"], absmax, self.BLOCK, "nf4", shape, dtype)

    def _dequantised_by_parts(self, inner: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        parts = [self.part(inner, shape, index) for index in range(shape[0])]
        if None in parts:
            raise RuntimeError(
                f"nf4: a weight of shape {tuple(shape)} has more elements than bitsandbytes counts, {KERNEL_ELEMENTS},"
                " and does not divide into whole blocks: leave its layer out with quantize.exclude"
            )
        matrix = torch.empty(shape, dtype=dtype, device=inner["qdata"].device)
        for target, part in zip(matrix, parts, strict=True):
            target.copy_(self.dequantise(part, shape[1:], dtype))
        return matrix


FORMATS: dict[str, type[Format]] = {kind.name: kind for kind in (Int8, Float8, Int4, Nf4)}


class _Nearest:
    """Finds the nearest of the 16 values of NormalFloat by a table, where a search would take several steps.

    The range from -1 to 1 is cut into cells, none of which has more than one of the bounds between two values.
    `_before` has the number of bounds in the cells before, `_bound` the bound in the cell, or infinity. An element's
    cell grows with it, however it is rounded: so all bounds in cells before are below it, and none in cells behind.
    """

    CELLS = 64

    def __init__(self, code: Tensor, device: torch.device):
        bounds = (code[1:] + code[:-1]) / 2
        cells = self._cells(bounds)
        bound = torch.full((self.CELLS,), math.inf)
        bound[cells] = bounds
        self._before = torch.searchsorted(cells, torch.arange(self.CELLS)).to(device, torch.uint8)
        self._bound = bound.to(device)

    def numbers(self, scaled: Tensor) -> Tensor:
        """Returns the numbers 0 to 15, uint8, of the values nearest to float32 elements [blocks, BLOCK] in -1 to 1."""
        cells = self._cells(scaled)
        # Not by index_select, which runs on one thread.
        numbers = self._before.expand(len(cells), -1).gather(1, cells)
        return numbers.add_(scaled > self._bound.expand(len(cells), -1).gather(1, cells))

    def _cells(self, scaled: Tensor) -> Tensor:
        return torch.add(scaled, 1.0).mul_((self.CELLS - 1) / 2).to(torch.int64)


@functools.cache
def _nearest_nf4(library: ModuleType, device: torch.device) -> tuple[Tensor, _Nearest]:
    """Returns bitsandbytes' 16 values, and the table for them on `device`."""
    code = library.get_4bit_type("nf4", device="cpu")
    return code, _Nearest(code, device)


def _divided(tensor: Tensor, number: float) -> Tensor:
    """Returns the quotient with the bits of a CPU: a GPU multiplies by the reciprocal of a number that is no tensor."""
    return tensor / tensor.new_tensor(number)


def _pieces(count: int, elements: int, device: torch.device, multiple: int = 1) -> Iterator[slice]:
    """Yields slices of `count` rows of `elements` elements to quantise in turn, each a multiple of `multiple` long."""
    at_once = PIECE_ELEMENTS_PER_THREAD * torch.get_num_threads() if device.type == "cpu" else GPU_PIECE_ELEMENTS
    rows = at_once // max(elements, 1)
    rows = max(rows // multiple, 1) * multiple
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))


def _exact_mean(values: Tensor) -> Tensor:
    """Returns the mean of float32 numbers that are not negative: the same bits in whatever order they are added."""
    largest = values.max().item()
    if not math.isfinite(largest):
        return values.mean()
    # Of the experts of one tensor there may be more than 2^25 scales: with fewer bits each, their sum fits.
    bits = min(SUMMAND_BITS, SUM_BITS - len(values).bit_length())
    unit = 2.0 ** (bits - math.frexp(largest)[1])
    total = values.double().mul_(unit).round_().long().sum().item()
    return torch.tensor(total / unit / len(values), dtype=torch.float32)


def _imported(format: Format, module: str) -> ModuleType:
    package = format.package.partition("=")[0]
    name = f"{package}.{module}"
    # Each product of a step asks, and silence clears the caches of all loggers.
    if (found := sys.modules.get(name)) is not None:
        return found
    try:
        with without_remarks():
            return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{format.name} cannot import {package} ({error}): pip install {format.package}") from error
