"""Activation checkpointing: keep what enters a block, compute the block again in backward (Chen et al. 2016)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint


def recompute(blocks: Iterable[nn.Module]) -> Callable[[], None]:
    """Has every block of `blocks`, whatever its class, recompute its activations in backward.

    Each block's `forward` is wrapped in torch's non-reentrant checkpoint: random state is restored for the recompute,
    keyword and nested arguments work, inputs need no gradient, and without gradients nothing is recomputed. Running
    statistics (BatchNorm) are updated by forward alone. Module hooks on the block stay outside and run once; those on
    modules within it run again. Call this after an offload mode has attached, so that the recompute too has the
    mode's weights in place.

    Returns:
        A function that gives every block its own `forward` back.
    """
    blocks = list(dict.fromkeys(blocks))  # a block listed twice, as where layers share weights, is wrapped once
    before = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = functools.partial(_checkpointed, block.forward, block)

    def undo() -> None:
        for block, own_forward in zip(blocks, before, strict=True):
            if own_forward is None:
                del block.forward
            else:
                block.forward = own_forward

    return undo


def _checkpointed(forward: Callable, block: nn.Module, *arguments: object, **keywords: object) -> object:
    # As positional leaves, so that hooks around the block see every tensor that is kept for the recompute: of
    # keywords and of what is nested, checkpoint itself holds on to.
    leaves, structure = tree_flatten((arguments, keywords))

    def run(*leaves: object) -> object:
        arguments, keywords = tree_unflatten(leaves, structure)
        return forward(*arguments, **keywords)

    return checkpoint(run, *leaves, use_reentrant=False, context_fn=functools.partial(_contexts, block))


def _contexts(block: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    norms = [module for module in block.modules() if isinstance(module, _NormBase) and module.track_running_stats]
    return nullcontext(), _StatisticsAsTheyAre(norms) if norms else nullcontext()


class _StatisticsAsTheyAre(TorchFunctionMode):
    """Normalises as in training, without counting the batch a second time.

    At the level of operations, because an offload mode may put other tensors in the place of a layer's buffers any
    time up to its forward.
    """

    def __init__(self, norms: list[_NormBase]):
        super().__init__()
        self._norms = norms

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (F.batch_norm, F.instance_norm):
            # Not on copies of the statistics: these are saved for backward, and must be the tensors that forward saved.
            kwargs = {**kwargs, "momentum": 0.0}
        elif function is Tensor.add_ and any(args[0] is norm.num_batches_tracked for norm in self._norms):
            return args[0]
        return function(*args, **kwargs)
