"""The operands of one AdamW update: tensors of the formats that the knobs choose, and hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from offload.errors import KnobError
from offload.knobs import in_range
from offload.optimizer.block_quantise import BLOCK


class HyperParameters(NamedTuple):
    """The hyper-parameters of one update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def check_hyperparameters(lr: float, betas: Sequence[float], eps: float, weight_decay: float) -> None:
    """Raises KnobError for a value out of range."""
    in_range("lr", lr, at_least=0)
    # Less is 0 in float32, in which updates are computed: 0 / 0 where a gradient is 0.
    in_range("eps", eps, at_least=1e-45)
    in_range("weight_decay", weight_decay, at_least=0)
    if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        raise KnobError("betas", list(betas), "must be two numbers, at least 0 and below 1")


@dataclass(frozen=True)
class Operands:
    """The tensors that an update reads and writes: 1-D, contiguous, on one device.

    All have the length of the range that is updated, but for the scales. A range is any part of a parameter; in 8 bits
    it begins at a multiple of 256.

    Args:
        weight, gradient: of any floating dtype.
        exp_avg, exp_avg_sq: float32 or bfloat16, or uint8 codes of `block_quantise`: computed in float32.
        master: what makes the master of the weight: the master itself (float32), the 16 bits that a bfloat16 weight
            lacks of it (int16, see `rounding.split`), or the rounding error of such a weight (bfloat16). None: the
            weight is its own; a bfloat16 weight is then rounded stochastically.
        exp_avg_scale, exp_avg_sq_scale: float32, the scales of the codes.
        start: the place of the first element in its parameter.
        seed: of the parameter's noise (`rounding.noise_seed`).
        rounds_moments: round moments below float32 stochastically, and not to nearest.
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
    rounds_moments: bool = False

    @property
    def takes_noise(self) -> bool:
        """True if something is rounded stochastically."""
        return self.rounds_moments or (self.master is None and self.weight.dtype == torch.bfloat16)

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
        return Operands(
            weight=self.weight[piece],
            gradient=self.gradient[piece],
            exp_avg=self.exp_avg[piece],
            exp_avg_sq=self.exp_avg_sq[piece],
            master=None if self.master is None else self.master[piece],
            exp_avg_scale=None if self.exp_avg_scale is None else self.exp_avg_scale[blocks],
            exp_avg_sq_scale=None if self.exp_avg_sq_scale is None else self.exp_avg_sq_scale[blocks],
            start=self.start + piece.start,
            seed=self.seed,
            rounds_moments=self.rounds_moments,
        )
