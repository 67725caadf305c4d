"""The operands of one AdamW update: tensors of the formats that the knobs choose, and hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from offload.optimizer.block_quantise import BLOCK

# Tensors with a number for each element, and those with one for each block of 256.
EACH = ("weight", "gradient", "exp_avg", "exp_avg_sq", "master")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")


class HyperParameters(NamedTuple):
    """The hyper-parameters of one update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Operands:
    """The tensors that an update reads and writes: 1-D, contiguous, on one device.

    All have the length of the range that is updated, but for the scales. A range is any part of a parameter; in 8 bits
    it begins at a multiple of 256.

    Args:
        weight, gradient: of any floating dtype.
        exp_avg, exp_avg_sq: float32 or bfloat16, or uint8 codes of `block_quantise`: computed in float32.
        master: what makes the master of the weight: the master itself (float32), or the 16 bits that a bfloat16 weight
            lacks of it (int16, see `rounding.split`). None: the weight is its own; a bfloat16 weight is then rounded
            stochastically.
        exp_avg_scale, exp_avg_sq_scale: float32, the scales of the codes.
        start: the place of the first element in its parameter.
        seed: of the parameter's noise (`rounding.noise_seed`).
    """

    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None = None
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None
    start: int = 0
    seed: int = 0

    @property
    def takes_noise(self) -> bool:
        """True if the weight is rounded stochastically."""
        return self.master is None and self.weight.dtype == torch.bfloat16

    def split(self, size: int) -> Iterator[Operands]:
        """Yields pieces of `size` elements, from first to last; with scales, of at least one block."""
        count = self.weight.numel()
        if self.exp_avg_scale is not None:
            size = max(size - size % BLOCK, BLOCK)
        for begin in range(0, count, size):
            yield self.part(range(begin, min(begin + size, count)))

    def part(self, elements: range) -> Operands:
        """Returns these elements of each tensor; with scales, a range that begins with a block of 256."""
        piece = slice(elements.start, elements.stop)
        blocks = slice(piece.start // BLOCK, -(-piece.stop // BLOCK))
        cuts = dict.fromkeys(EACH, piece) | dict.fromkeys(SCALES, blocks)
        parts = {name: tensor[cut] for name, cut in cuts.items() if (tensor := getattr(self, name)) is not None}
        return replace(self, **parts, start=self.start + piece.start)
