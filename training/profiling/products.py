"""Measures the rates of products on a device: of a block with all that it does, of experts, and of attention."""

import statistics
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention_kernels import causal_kernel
from models.llama import Block, rotary_tables
from offload.planning import MemoryTracker, fused_kernels, without_compiler
from training.profiling.hardware import seconds_of


class Work(NamedTuple):
    """FLOPs of products, those of attention among them, and the bytes that other operations read and write."""

    flops: float
    attention_flops: float
    memory_bytes: int


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    # The first calls load libraries and choose kernels. A CPU takes seconds for products in bf16, and varies by more.
    first, timed = (3, 5) if device.type == "cuda" else (1, 2)
    return statistics.median([seconds_of(call, device) for _ in range(first + timed)][first:])


def block_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Measures forward and backward of a Llama block, on a GPU that of a 7B model; returns FLOP/s."""
    block, hidden = _block(device.type, device, dtype)
    return block_work(device.type, dtype).flops / _seconds(partial(_step, block, hidden), device)


def grouped_flops_per_s(device: torch.device) -> float:
    """Measures forward and backward of the products of experts in bf16; returns FLOP/s.

    On a GPU those of Qwen3-30B-A3B for 16,384 tokens, as transformers calls them (`experts_implementation=grouped_mm`).
    Rows are spread over experts at random. Raises RuntimeError where torch has no such product, or memory lacks.
    """
    width, inner, experts, rows = (2048, 768, 128, 8 * 16384) if device.type == "cuda" else (64, 32, 8, 256)
    chosen = torch.randint(experts, (rows,), generator=torch.Generator().manual_seed(0))
    ends = chosen.bincount(minlength=experts).cumsum(0).to(device, torch.int32)
    flops = seconds = 0.0
    for inputs, outputs in ((width, 2 * inner), (inner, width)):
        made = partial(torch.randn, device=device, dtype=torch.bfloat16)
        factors = made(rows, inputs, requires_grad=True), made(experts, outputs, inputs, requires_grad=True)
        call = partial(_grouped_step, *factors, ends, made(rows, outputs))
        seconds += _seconds(call, device)
        flops += 6.0 * rows * inputs * outputs
    return flops / seconds


def _grouped_step(hidden: Tensor, weights: Tensor, ends: Tensor, grad: Tensor) -> None:
    torch.autograd.grad(F.grouped_mm(hidden, weights.transpose(-2, -1), offs=ends), (hidden, weights), grad)


def attention_flops_per_s(device: torch.device) -> float:
    """Measures forward and backward of causal attention in bf16, as models call it; returns FLOP/s.

    On a GPU that is a row of 16,384 tokens with 32 heads of 128, and 8 of keys and values. Backward counts as twice
    forward, though its kernel computes the scores again.
    """
    length, heads, head_dim = (16384, 32, 128) if device.type == "cuda" else (256, 4, 64)
    made = partial(torch.randn, device=device, dtype=torch.bfloat16, requires_grad=True)
    query, key, value = (made(1, count, length, head_dim) for count in (heads, heads // 4, heads // 4))
    call = partial(_attention_step, query, key, value)
    return 6.0 * heads * head_dim * length**2 / _seconds(call, device)


def _attention_step(query: Tensor, key: Tensor, value: Tensor) -> None:
    with causal_kernel(query, key, value):
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.autograd.grad(context, (query, key, value), torch.ones_like(context))


@cache
@without_compiler
def block_work(kind: str, dtype: torch.dtype) -> Work:
    """Returns what forward and backward of that block do; `kind` is that of the device, cuda or cpu."""
    tracker, (block, hidden) = MemoryTracker(), _block(kind, "meta", dtype)
    with fused_kernels(tracker.add_flops), tracker.recording():
        _step(block, hidden)
    return Work(tracker.flops, tracker.flops_of["attention"], tracker.memory_bytes)


def _block(kind: str, where: torch.device | str, dtype: torch.dtype) -> tuple[Block, Tensor]:
    width, inner, heads, tokens = (4096, 11008, 32, 2048) if kind == "cuda" else (512, 1376, 8, 256)
    hidden = torch.randn(2, tokens, width, device=where, dtype=dtype, requires_grad=True)
    with torch.device(where):
        return Block(width, inner, heads, heads, 1e-5).to(dtype), hidden


def _step(block: Block, hidden: Tensor) -> None:
    cos, sin = rotary_tables(hidden.shape[1], block.self_attn.head_dim, 10000.0, hidden)
    block(hidden, cos, sin).backward(torch.ones_like(hidden))
