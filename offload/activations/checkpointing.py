"""Activation checkpointing: keep the inputs of a block, and compute the block again in backward (Chen et al. 2016)."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.activations.caches import CacheBefore
from offload.torch_private.block_attributes import BlockAttributes
from offload.torch_private.block_buffers import BlockBuffers
from offload.torch_private.module_contexts import ReplacedForward
from offload.torch_private.saved_tensor_hooks import active_hooks, counting_checkpoint, leave_weights_uncounted
from offload.torch_private.torch_internals import tree_flatten, tree_unflatten


def recompute(blocks: Iterable[nn.Module]) -> Callable[[], None]:
    """Makes every block of `blocks`, whatever its class, recompute its activations in backward.

    Each block's `forward` is wrapped in torch's non-reentrant checkpoint: random state is restored for the recompute,
    keyword and nested arguments work, inputs need no gradient, and without gradients nothing is recomputed. Buffers
    (running statistics, counters) and attributes of modules are changed by forward alone, and the recompute starts from
    those that its forward started from; from the lists and caches of keys and values, too, to which a block adds.
    Module hooks on the block run once, outside of the checkpoint; those on modules within the block run again in the
    recompute. Call this after an offload mode has attached, so that the recompute, too, has the mode's weights in
    place; attaching afterwards is refused for blocks with buffers of their own.

    In a checkpoint of torch around it a block is left to that one.

    Copies of a block (deepcopy, `torch.save`) do not recompute.

    Returns:
        A function that restores the `forward` of every block.
    """
    # A block that is listed twice (layers that share weights) is wrapped once.
    recomputed = [_Recomputed(block) for block in dict.fromkeys(blocks)]

    def undo() -> None:
        for forward in recomputed:
            forward.remove()

    return undo


class _Recomputed(ReplacedForward):
    computes_again = True

    def __init__(self, block: nn.Module):
        super().__init__(block)
        # torch ends a recompute early by an exception, which a scripted module turns into an error.
        self._stops_early = not any(isinstance(module, torch.jit.ScriptModule) for module in block.modules())

    def run(self, *arguments: object, **keywords: object) -> object:
        # A checkpoint of the user's own around the block computes it again, and changes its buffers again, by itself.
        if not torch.is_grad_enabled() or counting_checkpoint(active_hooks()) is not None:
            return self._forward(*arguments, **keywords)
        # All tensors are passed as positional arguments, for which checkpoint calls the hooks on saved tensors. Tensors
        # in keyword and nested arguments it would keep by itself, and no hook could swap them.
        leaves, structure = tree_flatten((arguments, keywords))
        attributes, context = BlockAttributes(self._module), contextvars.copy_context()
        # Forward may add to the lists and caches that it gets. The recompute adds to copies of what they were before.
        found, failed = [(arguments, keywords)], []

        def run(*leaves: object) -> object:
            leave_weights_uncounted()
            if not found:
                leaves = [leaf.again() if isinstance(leaf, CacheBefore) else leaf for leaf in leaves]
                arguments, keywords = tree_unflatten(leaves, structure)
                with attributes.in_recompute():
                    return context.copy().run(self._forward, *arguments, **keywords)
            arguments, keywords = found.pop()
            try:
                return self._forward(*arguments, **keywords)
            except BaseException as error:
                failed.append(error)
                return None

        # No error passes through checkpoint itself: that of torch 2.11 leaves its hooks on saved tensors open then, for
        # as long as anybody keeps the traceback, and closes them in whichever thread lets go of it.
        result = checkpoint(
            run,
            *map(CacheBefore.of, leaves),
            use_reentrant=False,
            context_fn=functools.partial(_contexts, self._module),
            early_stop=self._stops_early,
        )
        if failed:
            raise failed.pop()
        return result


def _contexts(block: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    buffers = BlockBuffers(block)
    return buffers.in_forward(), buffers.in_recompute()
