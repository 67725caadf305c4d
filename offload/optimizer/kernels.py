"""The AdamW update of a range of one parameter (Loshchilov and Hutter 2019): its operands, and torch's kernel for it.

`FusedUpdate` is the reference: torch's own kernel on tiles, whose masters and moments are brought to float32 before and
rounded to their formats after it. `kernel_choice` takes faster ones: the C loop of `native_kernel`, and on a GPU that
of `triton_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from offload.optimizer.formats import (
    BLOCK,
    dequantise,
    join,
    noise_key,
    noise_of,
    quantise,
    round_stochastically,
    round_weights,
    split,
)
from offload.torch_private import torch_internals

# Elements updated at a time. On the host, converted values then stay in the cache, which is three times as fast as a
# copy of a whole large gradient. A GPU needs larger pieces, and has 64 MiB to spare for scratch.
HOST_TILE = 1 << 21
DEVICE_TILE = 1 << 24
# float32 elements of the longest vectors of a processor that torch uses.
VECTOR = 16
# Operands with a number for each element, and those with one for each block of 256, in the order of the C functions.
EACH = ("weight", "gradient", "master", "exp_avg", "exp_avg_sq")
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
        exp_avg, exp_avg_sq: float32 or bfloat16, or uint8 codes of `quantise`: computed in float32.
        master: what makes the master of the weight: the master itself (float32), or the 16 bits that a bfloat16 weight
            lacks of it (int16, see `formats.split`). None: the weight is its own; a bfloat16 weight is then rounded
            stochastically.
        exp_avg_scale, exp_avg_sq_scale: float32, the scales of the codes.
        start: the place of the first element in its parameter.
        seed: of the parameter's noise (`formats.noise_seed`).
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
        if self.gradient.numel() == len(elements):
            # It may have these alone, of a parameter of which others update the rest.
            del cuts["gradient"]
        parts = {name: tensor[cut] for name, cut in cuts.items() if (tensor := getattr(self, name)) is not None}
        return replace(self, **parts, start=self.start + piece.start)


class UpdateKernel(Protocol):
    """A kernel: one update of `operands` in place, on the calling thread. The gradient counts `scale` times.

    `step` is a float32 scalar on their device that counts this update, the first being 1.
    """

    name: str

    def __call__(
        self, operands: Operands, step: Tensor, hyperparameters: HyperParameters, scale: float = 1.0
    ) -> None: ...


class BlockwiseUpdate(UpdateKernel, Protocol):
    """A kernel for some operands, whose `step` may have an element for each block of `block` elements.

    The operands may then be those of many parameters without noise, each from the begin of a block on.
    """

    block: int

    def supports(self, operands: Operands, hyperparameters: HyperParameters) -> bool: ...


def fused_adamw_(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    hyperparameters: HyperParameters,
) -> None:
    """Updates a float32 master and its moments, flat, as the kernel under torch.optim.AdamW(fused=True).

    Its wrappers would count a step for each call. On the host torch rounds what is left behind the last whole vector
    neither as the C loop does, nor as in a longer range. So the rest is padded to a vector.
    """
    values = [[each] for each in (master, gradient, exp_avg, exp_avg_sq)]
    left = master.numel() % VECTOR if master.device.type == "cpu" else 0
    if left:
        tails = [each[-left:] for (each,) in values]
        padded = [F.pad(tail, (0, VECTOR - left)) for tail in tails]
        wholes = [[each[:-left]] if len(each) > left else [] for (each,) in values]
        values = [[*whole, tail] for whole, tail in zip(wholes, padded, strict=True)]
    settings = hyperparameters._asdict() | {"amsgrad": False, "maximize": False}
    torch_internals.fused_adamw_(*values, [], [step] * len(values[0]), **settings)
    if left:
        # A gradient is only read: a write would raise its version, as if somebody had changed it.
        for number in (0, 2, 3):
            tails[number].copy_(padded[number][:left])


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Runs torch's operations of the calling thread on `count` threads in the block; None changes nothing.

    Threads that have called torch before keep their number; one that first calls it meanwhile would start with `count`.
    """
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class FusedUpdate:
    """torch's fused kernel, tile by tile, with scratch of a tile for each operand that is not float32.

    `threads` are the cores that it may use on the host; None leaves the number to torch.
    """

    name = "fused"

    def __init__(self, threads: int | None = None):
        self._threads = threads

    @torch.no_grad()
    def __call__(self, operands: Operands, step: Tensor, hyperparameters: HyperParameters, scale: float = 1.0) -> None:
        device, tiles = operands.weight.device, {}

        def scratch(name: str, like: Tensor) -> Tensor:
            """Returns float32 memory of the length of `like`; no later piece is longer than the first."""
            if name not in tiles:
                tiles[name] = torch.empty(like.numel(), dtype=torch.float32, device=device)
            return tiles[name][: like.numel()]

        on_host = device.type == "cpu"
        with torch_threads(self._threads if on_host else None):
            for piece in operands.split(HOST_TILE if on_host else DEVICE_TILE):
                _update_tile(piece, scratch, step, hyperparameters, scale)


def _update_tile(
    piece: Operands,
    scratch: Callable[[str, Tensor], Tensor],
    step: Tensor,
    hyperparameters: HyperParameters,
    scale: float,
) -> None:
    weight, gradient, master = piece.weight, piece.gradient, piece.master
    if gradient.dtype != torch.float32 or scale != 1:
        gradient = scratch("gradient", gradient).copy_(gradient)
    if scale != 1:
        gradient.mul_(scale)
    if master is None:
        value = scratch("master", weight).copy_(weight) if piece.takes_noise else weight
    else:
        value = master if master.dtype == torch.float32 else join(weight, master, scratch("master", weight))
    # Stored numbers, their scales, and whether they are signed.
    moments = (piece.exp_avg, piece.exp_avg_scale, True), (piece.exp_avg_sq, piece.exp_avg_sq_scale, False)
    values = []
    for stored, scales, signed in moments:
        if scales is not None:
            values.append(dequantise(stored, scales, signed, scratch(f"moment {signed}", stored)))
        else:
            is_whole = stored.dtype == torch.float32
            values.append(stored if is_whole else scratch(f"moment {signed}", stored).copy_(stored))
    fused_adamw_(value, gradient, *values, step, hyperparameters)
    for (stored, scales, signed), new in zip(moments, values, strict=True):
        if scales is not None:
            quantise(new, stored, scales, signed)
        elif stored is not new:
            stored.copy_(new)
    if piece.takes_noise:
        round_stochastically(value, noise_of(noise_key(piece.seed, step), piece.start, weight.numel()), weight)
    elif master is not None and master.dtype == torch.int16:
        split(value, weight, master)
    elif master is not None:
        round_weights(value, weight)
