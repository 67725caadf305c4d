"""Activation checkpointing: keep the inputs of a block, and compute the block again in backward (Chen et al. 2016)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from offload.runtime.torch_internals import NormWithStatistics, tree_flatten, tree_unflatten


def recompute(blocks: Iterable[nn.Module]) -> Callable[[], None]:
    """Makes every block of `blocks`, whatever its class, recompute its activations in backward.

    Each block's `forward` is wrapped in torch's non-reentrant checkpoint: random state is restored for the recompute,
    keyword and nested arguments work, inputs need no gradient, and without gradients nothing is recomputed. Running
    statistics (BatchNorm) are updated by forward alone. Module hooks on the block run once, outside of the checkpoint;
    those on modules within the block run again in the recompute. Call this after an offload mode has attached, so that
    the recompute, too, has the mode's weights in place.

    Returns:
        A function that restores the `forward` of every block.
    """
    blocks = list(dict.fromkeys(blocks))  # a block that is listed twice (layers that share weights) is wrapped once
    own_forwards = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = functools.partial(_checkpointed, block.forward, block)

    def undo() -> None:
        for block, own_forward in zip(blocks, own_forwards, strict=True):
            if own_forward is None:
                del block.forward
            else:
                block.forward = own_forward

    return undo


def _checkpointed(forward: Callable, block: nn.Module, *arguments: object, **keywords: object) -> object:
    # All tensors are passed as positional arguments, for which checkpoint calls the hooks on saved tensors. Tensors in
    # keyword and nested arguments it would keep by itself, and no hook could swap them.
    leaves, structure = tree_flatten((arguments, keywords))

    def run(*leaves: object) -> object:
        arguments, keywords = tree_unflatten(leaves, structure)
        return forward(*arguments, **keywords)

    return checkpoint(run, *leaves, use_reentrant=False, context_fn=functools.partial(_contexts, block))


def _contexts(block: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    norms = [
        module for module in block.modules() if isinstance(module, NormWithStatistics) and module.track_running_stats
    ]
    return nullcontext(), _FrozenStatistics(norms) if norms else nullcontext()


class _FrozenStatistics(TorchFunctionMode):
    """Normalises as in training, without updating the running statistics a second time.

    It changes operations, not modules, because an offload mode may replace the buffers of a layer until its forward.
    """

    def __init__(self, norms: list[NormWithStatistics]):
        super().__init__()
        self._norms = norms

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (F.batch_norm, F.instance_norm):
            # Not copies of the statistics: they are saved for backward, and must be the tensors that forward saved.
            kwargs = {**kwargs, "momentum": 0.0}
        elif function is Tensor.add_ and any(args[0] is norm.num_batches_tracked for norm in self._norms):
            return args[0]
        return function(*args, **kwargs)
