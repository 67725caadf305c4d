"""Keeps models of other libraries from a kernel of torch for attention that fails."""

from __future__ import annotations

import torch


def avoid_cudnn_attention() -> None:
    """Takes cuDNN's attention out of the kernels that torch chooses from, in this process.

    On Hopper GPUs torch 2.11 prefers it. Its backward then reads memory that is not there in Flux ("an illegal memory
    access", seen on an H200 with every number of layers and images), and returns NaN under a mask for some lengths
    (pytorch/pytorch issue 196678). It is switched off for the process and not around a forward, because backward
    recomputes blocks outside of it, and must take the same kernel.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
