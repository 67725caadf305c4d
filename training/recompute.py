"""Activation checkpointing: keep what enters a block, compute the block again in backward (Chen et al. 2016)."""

import functools
from collections.abc import Callable, Iterable

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(blocks: Iterable[nn.Module]) -> Callable[[], None]:
    """Has every block of `blocks`, whatever its class, recompute its activations in backward.

    Each block's `forward` is wrapped in torch's non-reentrant checkpoint: random state is restored for the recompute,
    keyword and nested arguments work, inputs need no gradient, and without gradients nothing is recomputed. Module
    hooks on the block stay outside and run once; those on modules within it run again. Call this after an offload mode
    has attached, so that the recompute too has the mode's weights in place.

    Returns:
        A function that gives every block its own `forward` back.
    """
    blocks = list(dict.fromkeys(blocks))  # a block listed twice, as where layers share weights, is wrapped once
    before = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def undo() -> None:
        for block, own_forward in zip(blocks, before, strict=True):
            if own_forward is None:
                del block.forward
            else:
                block.forward = own_forward

    return undo
