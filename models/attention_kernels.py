"""Chooses the kernel of torch's attention on a GPU: cuDNN's where it is right and faster, else FlashAttention's.

On Hopper GPUs cuDNN's takes 0.6 of the time of torch's FlashAttention, forward and backward together (H200, torch
2.11, 16k and 64k tokens, 32 heads of 128: 478 and 479 TFLOP/s against 268 and 283).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HALF = (torch.bfloat16, torch.float16)
HOPPER = (9, 0)
# What was compared with FlashAttention's results: heads of these sizes, and sequences of whole tiles. Below so many
# tokens attention is a small part of a block.
HEADS, TILE, LEAST_TOKENS = (64, 128), 128, 1024
FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def avoid_cudnn_attention() -> None:
    """Takes cuDNN's attention out of the kernels that torch chooses from, in this process.

    On Hopper GPUs torch 2.11 prefers it. Its backward then reads memory that is not there in Flux ("an illegal memory
    access", seen on an H200 with every number of layers and images), and returns NaN under a mask for some lengths
    (pytorch/pytorch issue 196678). It is switched off for the process and not around a forward, because backward
    recomputes blocks outside of it, and must take the same kernel. `causal_kernel` switches it on for single calls.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def causal_kernel(query: Tensor, key: Tensor, value: Tensor) -> AbstractContextManager:
    """Returns what surrounds a causal call of attention without mask or dropout: cuDNN's kernel, where that suits.

    query, key, value: [batch, heads, seq_len, head_dim]; keys and values may have fewer heads. A block that is computed
    again calls this again, and takes the same kernel.
    """
    length, head_dim = query.shape[-2:]
    suits = (
        query.is_cuda
        and query.dtype in HALF
        and value.shape[-1] == head_dim in HEADS
        and length == key.shape[-2] >= LEAST_TOKENS
        and length % TILE == 0
        and torch.cuda.get_device_capability(query.device) == HOPPER
    )
    return sdpa_kernel(FUSED, set_priority=True) if suits else nullcontext()
