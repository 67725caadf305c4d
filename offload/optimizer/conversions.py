"""Brings the state of a parameter from any format into another."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from offload.optimizer.block_quantise import dequantise, quantise, scales_for
from offload.optimizer.formats import CODES, MASTER_NAMES, MOMENTS, SCALE, StateFormat
from offload.optimizer.rounding import add_compensation, join
from offload.optimizer.states import WEIGHT, State

MASTER, REMAINDER, COMPENSATION = (MASTER_NAMES[dtype] for dtype in (torch.float32, torch.int16, torch.bfloat16))


def moment_names_of(state: Container[str]) -> tuple[str, str]:
    """Returns the names that the moments have in `state`: those of codes where it has codes."""
    first, second = (CODES.format(name) if CODES.format(name) in state else name for name in MOMENTS)
    return first, second


def in_format(state: State, weight: Tensor, format: StateFormat) -> State:
    """Returns a state of any format in `format`; tensors that fit already are the same, without a copy.

    `weight` is the parameter, with the values that belong to the state. A master that the state lacks stays absent,
    and so does one that consists of remainders where the weight is not bfloat16. Narrower moments are rounded to
    nearest. From a master to no master, or to a compensation, low bits are lost.
    """
    found = {"step": state["step"]}
    for signed, moment, name, wanted in zip(
        (True, False), MOMENTS, moment_names_of(state), format.moment_names, strict=True
    ):
        scale = SCALE.format(moment)
        if name == wanted:
            found[wanted] = state[name] if wanted != moment else state[name].to(format.moment_dtype)
        elif wanted == moment:
            found[wanted] = _values(state[name], state[scale], signed).to(format.moment_dtype)
        else:
            found[wanted], found[scale] = _codes(state[name], signed)
        if wanted != moment and scale not in found:
            found[scale] = state[scale]
    dtype = format.master_dtype(weight.dtype)
    if dtype is not None and (name := MASTER_NAMES[dtype]) in state:
        found[name] = state[name]
    elif dtype is not None and (master := _master(state, weight)) is not None:
        found[MASTER_NAMES[dtype]] = _beside(weight, master, dtype)
    return found


def copy_state(state: State, into: State, parameter: Tensor, format: StateFormat) -> None:
    """Copies a state of any format into that of `parameter`, which has `format` and all its tensors.

    The parameter has the values that belong to the state; where that has no master, they are it.
    """
    found = in_format(state, parameter, format)
    for name, tensor in into.items():
        if name in found:
            tensor.copy_(found[name])
        elif name in (WEIGHT, MASTER):
            tensor.copy_(parameter)
        else:
            tensor.zero_()


def _values(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    flat = codes.contiguous().view(-1)
    values = torch.empty(flat.shape, dtype=torch.float32, device=codes.device)
    return dequantise(flat, scales, signed, values).view(codes.shape)


def _codes(moment: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    flat = moment.contiguous().view(-1).float()
    codes = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
    scales = torch.empty(scales_for(flat.numel()), dtype=torch.float32, device=flat.device)
    quantise(flat, codes, scales, signed)
    return codes.view(moment.shape), scales


def _master(state: State, weight: Tensor) -> Tensor | None:
    """Returns the float32 master that a state of a bfloat16 weight stands for; None if it has none for `weight`."""
    if MASTER in state:
        return state[MASTER]
    if REMAINDER in state and weight.dtype == torch.bfloat16:
        remainder = state[REMAINDER].contiguous()
        flat = weight.detach().to(remainder.device).contiguous().view(-1)
        values = torch.empty(flat.shape, dtype=torch.float32, device=flat.device)
        return join(flat, remainder.view(-1), values).view(weight.shape)
    if COMPENSATION in state:
        compensation = state[COMPENSATION]
        values = weight.detach().to(compensation.device, torch.float32, copy=True)
        return add_compensation(values, compensation)
    return None


def _beside(weight: Tensor, master: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the tensor of `dtype` that makes `master` beside a bfloat16 weight."""
    if dtype == torch.float32:
        return master
    weight = weight.detach().to(master.device).contiguous()
    if dtype == torch.bfloat16:
        return (master - weight.float()).to(dtype)
    bits, high = master.contiguous().view(torch.int32), weight.view(torch.int16).int()
    # Where torch has rounded a tie to even, the remainder is one too large: it loses one bit.
    tie = bits - high * 65536 == 0x8000
    low = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
    return torch.where(tie, 0x7FFF, low).to(dtype).masked_fill_(master.isnan(), 0)
