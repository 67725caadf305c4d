"""The AdamW update of a range of one parameter on a GPU as one Triton kernel: every operand is read and written once.

26 bytes of the device's memory a parameter with bf16 weights and gradients, compact masters and float32 moments, where
torch's operations move 114. Results are those of the host's C loop, whose rule, formats and order of operations
(adamw_formats.h) this file repeats: equal bit for bit, but for the payload of a NaN in float32.

Triton comes with torch's builds for CUDA alone, so this file is imported only where a CUDA device is used.
"""

from __future__ import annotations

import ctypes
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.optimizer.kernels import HyperParameters, Operands

FLOATS = {torch.float32, torch.bfloat16}
# Elements that one program of the kernel updates: 8 for each of its threads, 16 bytes of bf16.
BLOCK, WARPS = 1024, 4
# The compiler loads 16 bytes at once where it knows that addresses and lengths are multiples of 16.
ALIGNMENT = 16
POINTERS = ["weights", "gradients", "masters", "exp_avgs", "exp_avg_sqs", "step_at", "table"]
SCALARS = ["step_stride", "steps", "count", "first", "seed"]
# Entries of a table of corrections, and number of tables, beyond which operands are not supported.
LONGEST_TABLE, MOST_TABLES = 1 << 20, 16


class TritonUpdate:
    """The kernel below, on the current stream of the operands' device; see `kernels.BlockwiseUpdate`.

    It allocates nothing but one table of corrections for each pair of betas and device, 0.6 MB for 0.9 and 0.999.
    """

    name = "triton"
    block = BLOCK

    def __init__(self) -> None:
        self._tables: dict[tuple[float, float, torch.device], Tensor] = {}

    def supports(self, operands: Operands, hyperparameters: HyperParameters) -> bool:
        """Tells whether the kernel takes these: no float16, no moments in 8 bits, no beta above 0.99996."""
        _, beta1, beta2, _, _ = hyperparameters
        moments = {operands.exp_avg.dtype, operands.exp_avg_sq.dtype}
        if not FLOATS.issuperset({operands.weight.dtype, operands.gradient.dtype, *moments}):
            return False
        is_known = (beta1, beta2, operands.weight.device) in self._tables
        return is_known or (len(self._tables) < MOST_TABLES and _steps_until_one(max(beta1, beta2)) <= LONGEST_TABLE)

    @torch.no_grad()
    def __call__(self, operands: Operands, step: Tensor, hyperparameters: HyperParameters, scale: float = 1.0) -> None:
        weight, master, count = operands.weight, operands.master, operands.weight.numel()
        if count == 0:
            return
        lr, beta1, beta2, eps, weight_decay = hyperparameters
        table = self._table(beta1, beta2, weight.device)
        tensors = (weight, operands.gradient, master, operands.exp_avg, operands.exp_avg_sq)
        kind = "own" if weight.dtype == torch.float32 else "stochastic" if master is None else "compact"
        lerp = float32(1 - beta1)
        # Triton launches on the current device.
        with torch.cuda.device_of(weight):
            _update[(triton.cdiv(count, BLOCK),)](
                *tensors,
                step,
                table,
                0 if step.numel() == 1 else 1,
                table.shape[1],
                count,
                operands.start,
                operands.seed,
                float32(scale),
                float32(1 - lr * weight_decay),
                lerp,
                lerp if lerp < 0.5 else lerp - 1,
                float32(beta2),
                float32(1 - beta2),
                float32(eps),
                lr,
                master=kind,
                is_aligned=count % ALIGNMENT == 0
                and all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors if tensor is not None),
                block=BLOCK,
                num_warps=WARPS,
                # No products and sums are contracted but those that the kernel names.
                enable_fp_fusion=False,
            )

    def _table(self, beta1: float, beta2: float, device: torch.device) -> Tensor:
        """Returns float64 [2, steps]: 1 - beta1^n and sqrt(1 - beta2^n) for the steps n = 1, 2, ..., up to two ones.

        The step is on the device, and whoever asked for it would wait. Powers that the device computes may differ from
        the host's in a last bit; these are the host's own, by the expressions of `native_kernel.factors`.
        """
        key = (beta1, beta2, device)
        if key not in self._tables:
            steps = range(1, _steps_until_one(max(beta1, beta2)) + 1)
            rows = [[1 - beta1**n for n in steps], [math.sqrt(1 - beta2**n) for n in steps]]
            self._tables[key] = torch.tensor(rows, dtype=torch.float64).to(device)
        return self._tables[key]


def float32(value: float) -> float:
    """Returns a number rounded to float32, as C's functions take it."""
    return ctypes.c_float(value).value


def _steps_until_one(beta: float) -> int:
    """Returns a number of steps from which on 1 - beta^n is 1 in float64: beta^n is at most 2^-54."""
    return 1 if beta == 0 else math.ceil(-54 * math.log(2) / math.log(beta)) + 1


# Compiled once for the dtypes of the tensors and the values of the last three, and not anew for other numbers.
@triton.jit(do_not_specialize=SCALARS, do_not_specialize_on_alignment=POINTERS)
def _update(
    weights,
    gradients,
    masters,
    exp_avgs,
    exp_avg_sqs,
    step_at,
    table,
    step_stride: tl.int64,
    steps: tl.int64,
    count: tl.int64,
    first: tl.int64,
    seed: tl.int32,
    scale: tl.float32,
    decay: tl.float32,
    lerp: tl.float32,
    towards: tl.float32,
    beta2: tl.float32,
    rest2: tl.float32,
    eps: tl.float32,
    lr: tl.float64,
    master: tl.constexpr,
    is_aligned: tl.constexpr,
    block: tl.constexpr,
):
    # Of 64 bits: a parameter may have more than 2^31 elements.
    begin = tl.program_id(0).to(tl.int64) * block
    if is_aligned:
        # Equal, and now the compiler knows it for a multiple of 16.
        count = count // 16 * 16
    index = begin + tl.arange(0, block)
    inside = index < count
    weights, gradients = _at(weights, index, is_aligned), _at(gradients, index, is_aligned)
    exp_avgs, exp_avg_sqs = _at(exp_avgs, index, is_aligned), _at(exp_avg_sqs, index, is_aligned)
    if masters is not None:
        masters = _at(masters, index, is_aligned)

    # Before the first division, because the compiler moves no read across one: so all of them are under way at once.
    g = _read(gradients, inside) * scale
    m = _read(exp_avgs, inside)
    v = _read(exp_avg_sqs, inside)
    value = _read(weights, inside)
    if master == "compact":
        rest = tl.load(masters, inside).to(tl.int32)
        bits = value.to(tl.uint32, bitcast=True)
        # A negative remainder under a zero is outdated.
        rest = tl.where(((bits & 0x7FFFFFFF) == 0) & (rest < 0), 0, rest)
        value = (bits + rest.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)

    step = tl.load(step_at + tl.program_id(0) * step_stride).to(tl.int64)
    row = tl.maximum(tl.minimum(step, steps), 1) - 1
    # Triton's minus is a subtraction from 0, in which a zero loses its sign.
    minus_step_size = (lr / tl.load(table + row)).to(tl.float32) * -1.0
    correction = tl.load(table + steps + row).to(tl.float32)
    key = _mix(step.to(tl.uint32) ^ seed.to(tl.uint32, bitcast=True))
    place = (first + index).to(tl.uint32) ^ key

    m = tl.fma(towards, g - m, tl.where(lerp < 0.5, m, g))
    v = tl.fma(rest2 * g, g, v * beta2)
    change = tl.div_rn(minus_step_size * m, tl.div_rn(tl.sqrt_rn(v), correction) + eps)
    value = value * decay + change

    if master == "own":
        tl.store(weights, value, inside)
    elif master == "stochastic":
        _write_bf16(weights, _either_bits(value, _mix(place)), inside)
    else:
        away = _unless_nan(value, (value.to(tl.uint32, bitcast=True) + 0x8000) >> 16)
        _write_bf16(weights, away, inside)
        low = tl.where(value != value, 0, value.to(tl.uint32, bitcast=True) & 0xFFFF)
        tl.store(masters, low.to(tl.uint16).to(tl.int16, bitcast=True), inside)

    if exp_avgs.dtype.element_ty == tl.float32:
        tl.store(exp_avgs, m, inside)
        tl.store(exp_avg_sqs, v, inside)
    else:
        _write_bf16(exp_avgs, _even_bits(m), inside)
        _write_bf16(exp_avg_sqs, _even_bits(v), inside)


@triton.jit
def _at(pointers, index, is_aligned: tl.constexpr):
    pointers = pointers + index
    if is_aligned:
        pointers = tl.multiple_of(pointers, 16)
    return pointers


@triton.jit
def _read(pointers, inside):
    """float32 or bf16 numbers as float32."""
    numbers = tl.load(pointers, inside)
    if numbers.dtype == tl.bfloat16:
        bits = numbers.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        numbers = bits.to(tl.float32, bitcast=True)
    return numbers


@triton.jit
def _write_bf16(pointers, bits, inside):
    """The low halves of `bits` as bf16."""
    tl.store(pointers, bits.to(tl.uint16).to(tl.bfloat16, bitcast=True), inside)


@triton.jit
def _unless_nan(value, bits):
    return tl.where(value != value, 0x7FC0, bits)


@triton.jit
def _even_bits(value):
    """bf16 to nearest, ties to even."""
    bits = value.to(tl.uint32, bitcast=True)
    return _unless_nan(value, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@triton.jit
def _either_bits(value, noise):
    """bf16 up or down, by the low half of `noise`."""
    return _unless_nan(value, (value.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)) >> 16)


@triton.jit
def _mix(bits):
    """Wellons' lowbias32 of uint32."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)
