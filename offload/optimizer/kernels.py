"""The AdamW update of a range of one parameter (Loshchilov and Hutter 2019) by torch's kernel, on any device.

`FusedUpdate` is the reference: torch's own kernel on tiles, whose masters and moments are brought to float32 before and
rounded to their formats after it. `native_kernel` has the C loop that does each format in one pass over memory, and
`kernel_choice` takes the faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from offload.optimizer.block_quantise import dequantise, quantise
from offload.optimizer.fused_adamw import fused_adamw_
from offload.optimizer.operands import HyperParameters, Operands
from offload.optimizer.rounding import (
    MOMENT_NOISE,
    add_compensation,
    join,
    noise_key,
    noise_of,
    round_stochastically,
    round_weights,
    split,
)

# Elements updated at a time. On the host, converted values then stay in the cache, which is three times as fast as a
# copy of a whole large gradient. A GPU needs larger pieces, and has 64 MiB to spare for scratch.
HOST_TILE = 1 << 21
DEVICE_TILE = 1 << 24


class UpdateKernel(Protocol):
    """A kernel: one update of `operands` in place, on the calling thread.

    `step` is a float32 scalar on their device that counts this update, the first being 1. The gradient counts `scale`
    times.
    """

    name: str

    def __call__(
        self, operands: Operands, step: Tensor, hyperparameters: HyperParameters, scale: float = 1.0
    ) -> None: ...


class BlockwiseUpdate(UpdateKernel, Protocol):
    """A kernel for some operands, which takes a step for each block of elements, too.

    Its `step` may have as many elements as the operands have blocks of `block` elements, of which the last may be
    shorter: the operands may then be those of many parameters without noise, each from the begin of a block on.
    """

    block: int

    def supports(self, operands: Operands, hyperparameters: HyperParameters) -> bool: ...


class FusedUpdate:
    """torch's fused kernel, tile by tile, with scratch of a tile for each operand that is not float32.

    `threads` are the cores that it may use on the host; None leaves the number to torch.
    """

    name = "fused"

    def __init__(self, threads: int | None = None):
        self._threads = threads

    @torch.no_grad()
    def __call__(self, operands: Operands, step: Tensor, hyperparameters: HyperParameters, scale: float = 1.0) -> None:
        on_host = operands.weight.device.type == "cpu"
        tile = HOST_TILE if on_host else DEVICE_TILE
        scratch = _Scratch(operands.weight.device)
        with torch_threads(self._threads if on_host else None):
            for piece in operands.split(tile):
                _update_tile(piece, scratch, step, hyperparameters, scale)


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Runs torch's operations of the calling thread on `count` threads in the block; None changes nothing.

    Each thread that calls torch has such a number. Threads that have called it before keep theirs; one that first calls
    it while the block is open would start with `count`.
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


class _Scratch:
    """float32 tiles, one for each operand, made at its first use. No later piece is longer than the first."""

    def __init__(self, device: torch.device):
        self._device = device
        self._tiles: dict[str, Tensor] = {}

    def tile(self, name: str, size: int) -> Tensor:
        if name not in self._tiles:
            self._tiles[name] = torch.empty(size, dtype=torch.float32, device=self._device)
        return self._tiles[name][:size]

    def float32(self, name: str, tensor: Tensor) -> Tensor:
        """Returns the values of `tensor` in float32, in memory that may be overwritten."""
        return self.tile(name, tensor.numel()).copy_(tensor)


def _update_tile(
    piece: Operands, scratch: _Scratch, step: Tensor, hyperparameters: HyperParameters, scale: float
) -> None:
    gradient = piece.gradient
    if gradient.dtype != torch.float32 or scale != 1:
        gradient = scratch.float32("gradient", gradient)
    if scale != 1:
        gradient.mul_(scale)
    master = _read_master(piece, scratch)
    moments = [
        _read_moment(piece.exp_avg, piece.exp_avg_scale, True, "exp_avg", scratch),
        _read_moment(piece.exp_avg_sq, piece.exp_avg_sq_scale, False, "exp_avg_sq", scratch),
    ]
    # The kernel under torch.optim.AdamW(fused=True), whose wrappers would count a step for each tile.
    fused_adamw_(
        [master],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],
        [step],
        **hyperparameters._asdict(),
        amsgrad=False,
        maximize=False,
    )
    # A key takes more operations than the rest of a small update.
    key, count = noise_key(piece.seed, step) if piece.takes_noise else None, piece.weight.numel()
    noises = (None, None)
    if piece.rounds_moments:
        bits = noise_of(key, piece.start, count, MOMENT_NOISE)
        noises = (bits, bits >> 16)
    _write_moment(moments[0], piece.exp_avg, piece.exp_avg_scale, True, noises[0])
    _write_moment(moments[1], piece.exp_avg_sq, piece.exp_avg_sq_scale, False, noises[1])
    _write_master(master, piece, key)


def _read_master(piece: Operands, scratch: _Scratch) -> Tensor:
    """Returns the master in float32: the operand itself, or scratch."""
    weight, master = piece.weight, piece.master
    if master is None:
        return weight if weight.dtype == torch.float32 else scratch.float32("master", weight)
    if master.dtype == torch.float32:
        return master
    if master.dtype == torch.int16:
        return join(weight, master, scratch.tile("master", weight.numel()))
    return add_compensation(scratch.float32("master", weight), master)


def _write_master(values: Tensor, piece: Operands, key: Tensor | None) -> None:
    weight, master = piece.weight, piece.master
    if master is None:
        if weight.dtype == torch.bfloat16:
            round_stochastically(values, noise_of(key, piece.start, weight.numel()), weight)
    elif master.dtype == torch.int16:
        split(values, weight, master)
    else:
        round_weights(values, weight)
        if master.dtype != torch.float32:
            master.copy_(values.sub_(weight))


def _read_moment(stored: Tensor, scales: Tensor | None, signed: bool, name: str, scratch: _Scratch) -> Tensor:
    if stored.dtype == torch.float32:
        return stored
    if scales is None:
        return scratch.float32(name, stored)
    return dequantise(stored, scales, signed, scratch.tile(name, stored.numel()))


def _write_moment(values: Tensor, stored: Tensor, scales: Tensor | None, signed: bool, noise: Tensor | None) -> None:
    if scales is not None:
        quantise(values, stored, scales, signed, noise)
    elif stored.dtype != torch.float32:
        if noise is None:
            stored.copy_(values)
        else:
            round_stochastically(values, noise, stored)
