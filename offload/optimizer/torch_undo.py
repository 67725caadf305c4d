"""Updates that can be undone, by any kernel: the reference for adamw_undo.c, and its substitute without a compiler.

The kernel updates a tile, and torch's operations compare its old numbers, of which there is a copy, with estimates from
the new ones. The operations are the same when the tile is undone, one rounding each, so the estimates are too.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from offload.optimizer.kernels import HOST_TILE, UpdateKernel, torch_threads
from offload.optimizer.operands import HyperParameters, Operands
from offload.optimizer.rounding import join, round_weights, split
from offload.optimizer.undo_log import Outcome, UndoLog

WRITTEN = ("weight", "master", "exp_avg", "exp_avg_sq")


class TorchReversible:
    """`ReversibleUpdate` around `kernel`, on `threads` cores."""

    def __init__(self, kernel: UpdateKernel, threads: int):
        self._kernel = kernel
        self._threads = threads

    @torch.no_grad()
    def update(self, operands: Operands, step: Tensor, hyperparameters: HyperParameters, log: UndoLog) -> Outcome:
        log.progress.zero_()
        squares = 0.0
        with torch_threads(self._threads):
            for piece, part in zip(operands.split(HOST_TILE), log.split(HOST_TILE), strict=True):
                old = _copy(piece)
                self._kernel(piece, step, hyperparameters)
                if not _write(part, old, piece, step, hyperparameters):
                    for name in WRITTEN:
                        if (tensor := getattr(piece, name)) is not None:
                            tensor.copy_(getattr(old, name))
                    return Outcome(squares, False)
                squares += piece.gradient.double().square_().sum().item()
        return Outcome(squares, True)

    @torch.no_grad()
    def undo(self, operands: Operands, step: Tensor, hyperparameters: HyperParameters, log: UndoLog) -> None:
        with torch_threads(self._threads):
            for piece, part in zip(operands.split(HOST_TILE), log.split(HOST_TILE), strict=True):
                if part.progress[0, 0]:
                    _undo(part, piece, step, hyperparameters)


def _write(log: UndoLog, old: Operands, new: Operands, step: Tensor, hyperparameters: HyperParameters) -> bool:
    """Writes the log of a tile. Returns False where it has too few entries."""
    master = _master_of(old)
    far = torch.zeros(len(master), dtype=torch.bool)
    if old.master is not None:
        # A weight or a remainder that somebody else has written is not what the master gives.
        written = dataclasses.replace(old, weight=torch.empty_like(old.weight), master=torch.empty_like(old.master))
        _set_master(written, master)
        far |= (_bits(written.weight) != _bits(old.weight)) | (_bits(written.master) != _bits(old.master))
    numbers = (old.exp_avg, old.exp_avg_sq, master)
    estimates = (*_last_moments(new, hyperparameters), _last_master(new, old, step, hyperparameters))
    for code, number, estimate in zip(log.codes, numbers, estimates, strict=True):
        # In 32 bits, where differences wrap around as sums do.
        off = _bits(number) - _bits(estimate)
        far |= (off < -128) | (off > 127) | estimate.isnan()
        code.copy_(off)
    places = far.nonzero().flatten()
    if len(places) > len(log.entries):
        return False
    bits = [torch.zeros_like(places) if tensor is None else _bits(tensor)[places] for tensor in _stored(old)]
    log.entries[: len(places)] = torch.stack([places, *bits], dim=1)
    log.progress[0] = torch.tensor([len(far), len(places)])
    return True


def _undo(log: UndoLog, piece: Operands, step: Tensor, hyperparameters: HyperParameters) -> None:
    new = _copy(piece)
    moments = piece.exp_avg, piece.exp_avg_sq
    for moment, estimate, code in zip(moments, _last_moments(new, hyperparameters), log.codes, strict=False):
        moment.copy_(_number_of(_bits(estimate) + code, moment.dtype))
    estimate = _last_master(new, piece, step, hyperparameters)
    _set_master(piece, _number_of(_bits(estimate) + log.codes[2], torch.float32))
    entries = log.entries[: int(log.progress[0, 1])]
    places = entries[:, 0].long()
    for tensor, bits in zip(_stored(piece), entries.T[1:], strict=True):
        if tensor is not None:
            integers = _integers(tensor)
            integers[places] = bits.to(integers.dtype)


def _last_moments(new: Operands, hyperparameters: HyperParameters) -> tuple[Tensor, Tensor]:
    """Estimates the moments before the update that made `new`, rounded to their format."""
    _, beta1, beta2, _, _ = hyperparameters
    gradient = new.gradient.float()
    exp_avg = (new.exp_avg.float() - gradient * (1 - beta1)) * _inverse(beta1)
    exp_avg_sq = (new.exp_avg_sq.float() - gradient * (1 - beta2) * gradient) * _inverse(beta2)
    return exp_avg.to(new.exp_avg.dtype), exp_avg_sq.to(new.exp_avg_sq.dtype)


def _last_master(new: Operands, old: Operands, step: Tensor, hyperparameters: HyperParameters) -> Tensor:
    """Estimates the master before the update that made `new`, in float32, from it and the moments of `old`."""
    lr, beta1, beta2, eps, weight_decay = hyperparameters
    count, gradient = step.item(), new.gradient.float()
    exp_avg, exp_avg_sq = old.exp_avg.float(), old.exp_avg_sq.float()
    exp_avg = exp_avg + (gradient - exp_avg) * (1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + gradient * (1 - beta2) * gradient
    correction = math.sqrt(1 - beta2**count)
    change = exp_avg * (-lr / (1 - beta1**count)) / (exp_avg_sq.sqrt() / correction + eps)
    return (_master_of(new) - change) * _inverse(1 - lr * weight_decay)


def _inverse(factor: float) -> float:
    # Without an inverse the estimates are NaN, so all elements become entries.
    return 1 / factor if factor else math.nan


def _master_of(of: Operands) -> Tensor:
    """Returns the master in float32, in memory of its own where it is not stored so."""
    if of.master is None:
        return of.weight
    if of.master.dtype == torch.float32:
        return of.master
    return join(of.weight, of.master, torch.empty_like(of.weight, dtype=torch.float32))


def _set_master(of: Operands, master: Tensor) -> None:
    """Writes the master, float32, and the weight that it makes."""
    if of.master is None:
        of.weight.copy_(master)
    elif of.master.dtype == torch.float32:
        of.master.copy_(master)
        round_weights(master, of.weight)
    else:
        split(master, of.weight, of.master)


def _stored(of: Operands) -> tuple[Tensor | None, ...]:
    """Returns the tensors whose bits an entry has, in its order."""
    return of.weight, of.master, of.exp_avg, of.exp_avg_sq


def _copy(of: Operands) -> Operands:
    copies = {name: tensor.clone() for name in WRITTEN if (tensor := getattr(of, name)) is not None}
    return dataclasses.replace(of, **copies)


def _integers(tensor: Tensor) -> Tensor:
    """Returns a view of the bits: int32 of numbers of 32 bits, int16 of numbers of 16."""
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16)


def _bits(tensor: Tensor) -> Tensor:
    """Returns the bits of each number, int32; those of 16 bits have their sign in the upper half."""
    return _integers(tensor).to(torch.int32)


def _number_of(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of `dtype` that have these bits, int32."""
    return bits.to(torch.int32 if dtype.itemsize == 4 else torch.int16).view(dtype)
