"""Holds attention over long sequences to kernels that store no scores of all pairs of tokens."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.planning import LONG
from training.errors import UserError
from training.settle.components import Components

# What torch says where none of the kernels that it may take computes an attention, on a CPU and on a GPU.
NO_KERNEL = ("No available kernel", "Invalid backend")


@contextmanager
def without_scores(components: Components) -> Iterator[None]:
    """Takes torch's plain attention out of its choice inside the block, where sequences of text have `LONG` tokens.

    For the whole process, since backward computes blocks again in threads of its own. Raises UserError where torch has
    no other kernel.
    """
    config = components.config
    if components.task.unit != "tokens" or config.seq_len < LONG:
        yield
        return
    before = torch.backends.cuda.math_sdp_enabled()
    torch.backends.cuda.enable_math_sdp(False)
    try:
        yield
    except RuntimeError as error:
        if not any(text in str(error) for text in NO_KERNEL):
            raise
        dtype = str(components.dtype).removeprefix("torch.")
        # CUDA's kernel for it wants as many heads of keys as of queries.
        change = "precision=bf16" if dtype == "float32" and components.device.type == "cuda" else "another model"
        raise UserError(
            f"seq_len={config.seq_len}: for attention of this model in {dtype} torch has the kernel alone that stores"
            f" {config.seq_len} x {config.seq_len} scores for each head: take {change}, no dropout in attention, or a"
            f" seq_len below {LONG}"
        ) from error
    finally:
        torch.backends.cuda.enable_math_sdp(before)
