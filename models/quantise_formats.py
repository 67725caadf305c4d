"""The formats of quantised weights: which tensors they are, and how a matrix becomes these and is made of them again.

The numbers of a format are those of a library, torchao or bitsandbytes, which is imported where a matrix is quantised.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from models.quiet_imports import without_remarks

TORCHAO, BITSANDBYTES = "torchao==0.18.0", "bitsandbytes==0.50.2"


@dataclass(frozen=True)
class Format:
    """A way to hold a matrix [rows, columns] in few bits. Equal formats of equal arguments give equal bits."""

    name: ClassVar[str]
    package: ClassVar[str]

    def tensors(self, shape: torch.Size) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns shape and dtype of each tensor for a matrix of `shape`."""
        raise NotImplementedError

    def quantise(self, matrix: Tensor) -> dict[str, Tensor]:
        """Returns the tensors for a matrix on the CPU."""
        raise NotImplementedError

    def dequantise(self, inner: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns the matrix that the tensors stand for."""
        raise NotImplementedError

    def empty(self, shape: torch.Size, device: torch.device) -> dict[str, Tensor]:
        """Returns tensors without values, for a matrix of `shape`."""
        kinds = self.tensors(shape).items()
        return {name: torch.empty(inner, dtype=dtype, device=device) for name, (inner, dtype) in kinds}

    def check_package(self) -> None:
        """Raises ValueError in one line if the package is missing."""
        package = self.package.partition("=")[0]
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{package} is missing: pip install {self.package}")


@dataclass(frozen=True)
class Int8(Format):
    """Whole numbers from -127 to 127 and a float32 scale for each row (torchao's Int8WeightOnlyConfig)."""

    name = "int8"
    package = TORCHAO

    def tensors(self, shape):
        return {"qdata": (tuple(shape), torch.int8), "scale": ((shape[0], 1), torch.float32)}

    def quantise(self, matrix):
        library = _imported(self, "quantization")
        made = library.Int8Tensor.from_hp(matrix, library.PerRow())
        return {"qdata": made.qdata, "scale": made.scale}

    def dequantise(self, inner, shape, dtype):
        return (inner["qdata"] * inner["scale"]).to(dtype)


@dataclass(frozen=True)
class Float8(Format):
    """Float8 (e4m3) and a float32 scale for each row (torchao's Float8WeightOnlyConfig)."""

    name = "float8"
    package = TORCHAO

    def tensors(self, shape):
        return {"qdata": (tuple(shape), torch.float8_e4m3fn), "scale": ((shape[0], 1), torch.float32)}

    def quantise(self, matrix):
        library = _imported(self, "quantization")
        made = library.Float8Tensor.from_hp(matrix, granularity=library.PerRow())
        return {"qdata": made.qdata, "scale": made.scale}

    def dequantise(self, inner, shape, dtype):
        return (inner["qdata"].to(torch.float32) * inner["scale"]).to(dtype)


@dataclass(frozen=True)
class Int4(Format):
    """Whole numbers from 0 to 15, two in a byte, with a float32 scale and a zero point for each group in a row.

    The numbers are those of torchao's affine quantisation. It has no such weight that computes on CPU and GPU.

    Attributes:
        group: columns that share a scale.
    """

    group: int = 64

    name = "int4"
    package = TORCHAO

    def __post_init__(self) -> None:
        if self.group < 2 or self.group % 2:
            raise ValueError(f"group={self.group}: must be even and at least 2, because two columns share a byte")

    def tensors(self, shape):
        rows, columns = shape
        # The last group of a row is filled up with zeros.
        groups = (rows, -(-columns // self.group), 1)
        packed = (rows, groups[1] * self.group // 2)
        return {"qdata": (packed, torch.uint8), "scale": (groups, torch.float32), "zero": (groups, torch.uint8)}

    def quantise(self, matrix):
        library = _imported(self, "quantization.quant_primitives")
        matrix = F.pad(matrix.to(torch.float32), (0, -matrix.shape[1] % self.group))
        common = {"block_size": (1, self.group), "quant_min": 0, "quant_max": 15}
        scale, zero = library.choose_qparams_affine(
            matrix, library.MappingType.ASYMMETRIC, target_dtype=torch.uint8, zero_point_dtype=torch.uint8, **common
        )
        numbers = library.quantize_affine(matrix, scale=scale, zero_point=zero, output_dtype=torch.uint8, **common)
        groups = (len(matrix), -1, 1)
        packed = numbers[:, 0::2] | (numbers[:, 1::2] << 4)
        return {"qdata": packed, "scale": scale.reshape(groups), "zero": zero.reshape(groups)}

    def dequantise(self, inner, shape, dtype):
        packed, zero = inner["qdata"], inner["zero"]
        numbers = torch.stack([packed & 15, packed >> 4], dim=-1).view(len(packed), -1, self.group)
        # Differences of numbers from 0 to 15 fit in int8.
        matrix = ((numbers.view(torch.int8) - zero.view(torch.int8)) * inner["scale"]).to(dtype)
        return matrix.flatten(1)[:, : shape[1]]


@dataclass(frozen=True)
class Nf4(Format):
    """The 16 values of NormalFloat, two in a byte, with a scale for 64 elements each (QLoRA, Dettmers et al. 2023).

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

    def quantise(self, matrix):
        library = _imported(self, "functional")
        packed, state = library.quantize_4bit(
            matrix.contiguous(), blocksize=self.BLOCK, compress_statistics=self.double, quant_type="nf4"
        )
        made = {"qdata": packed, "code": state.code, "absmax": state.absmax}
        if self.double:
            made |= {"offset": state.offset, "nested_absmax": state.state2.absmax, "nested_code": state.state2.code}
        return made

    def dequantise(self, inner, shape, dtype):
        if inner["qdata"].is_meta:
            # A plan needs the bytes of the result alone.
            return torch.empty(shape, dtype=dtype, device="meta")
        library = _imported(self, "functional")
        nested = None
        if self.double:
            nested = library.QuantState(
                inner["nested_absmax"], code=inner["nested_code"], blocksize=self.SCALES_BLOCK, dtype=torch.float32
            )
        state = library.QuantState(
            inner["absmax"],
            shape=shape,
            code=inner["code"],
            blocksize=self.BLOCK,
            quant_type="nf4",
            dtype=dtype,
            offset=inner.get("offset"),
            state2=nested,
        )
        return library.dequantize_4bit(inner["qdata"], state)


FORMATS: dict[str, type[Format]] = {kind.name: kind for kind in (Int8, Float8, Int4, Nf4)}


def _imported(format: Format, module: str) -> ModuleType:
    package = format.package.partition("=")[0]
    try:
        with without_remarks():
            return importlib.import_module(f"{package}.{module}")
    except ImportError as error:
        raise ValueError(f"{format.name} cannot import {package} ({error}): pip install {format.package}") from error
