"""Activation checkpointing: keep the inputs of a block, and compute the block again in backward (Chen et al. 2016).

A recompute must find the caches among a block's arguments, such as keys and values of attention, as they were before
forward, and must not add to them a second time: `CacheBefore`.
"""

from __future__ import annotations

import contextvars
import io
import pickle
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload.torch_private.module_contexts import ReplacedForward, check_all_is_seen
from offload.torch_private.recomputed_blocks import BlockAttributes, BlockBuffers
from offload.torch_private.saved_tensor_hooks import active_hooks, counting_checkpoint, leave_weights_uncounted
from offload.torch_private.torch_internals import tree_flatten, tree_unflatten


def recompute(blocks: Iterable[nn.Module]) -> Callable[[], None]:
    """Makes every block of `blocks`, whatever its class, recompute its activations in backward.

    Its `forward` is wrapped in torch's non-reentrant checkpoint, which restores random state. Buffers, attributes and
    caches of keys and values are changed by forward alone, and the recompute starts from what its forward started from.
    Module hooks on the block run once, those within it again. Call this after an offload mode has attached, so that the
    recompute has its weights too; attaching afterwards is refused for blocks with buffers of their own.

    In a checkpoint of torch around it a block is left to that one. Copies of a block do not recompute. The function
    that is returned restores every `forward`. Raises ValueError in one line, and changes nothing, for a block with
    scripted modules or observers of torch.ao.
    """
    # A block that is listed twice (layers that share weights) is wrapped once.
    blocks = dict.fromkeys(blocks)
    for block in blocks:
        check_all_is_seen(block)
    recomputed = [_Recomputed(block) for block in blocks]

    def undo() -> None:
        for forward in recomputed:
            forward.remove()

    return undo


class _Recomputed(ReplacedForward):
    computes_again = True

    def run(self, *arguments: object, **keywords: object) -> object:
        # A checkpoint of the user's own around the block computes it again, and changes its buffers again, by itself.
        if not torch.is_grad_enabled() or counting_checkpoint(active_hooks()) is not None:
            return self._forward(*arguments, **keywords)
        # All tensors are passed as positional arguments, for which checkpoint calls the hooks on saved tensors. Tensors
        # in keyword and nested arguments it would keep by itself, and no hook could swap them.
        leaves, structure = tree_flatten((arguments, keywords))
        attributes, buffers = BlockAttributes(self._module), BlockBuffers(self._module)
        context = contextvars.copy_context()
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
            context_fn=lambda: (buffers.in_forward(), buffers.in_recompute()),
        )
        if failed:
            raise failed.pop()
        return result


# Shared between a cache and its copies, and not looked into.
SHARED = (Tensor, nn.Module, type, FunctionType, BuiltinFunctionType)


class CacheBefore:
    """A cache as it is now: its structure, and the tensors in it themselves, which are not copied."""

    def __init__(self, cache: object):
        self._name = type(cache).__name__
        self._shared: list = []
        file = io.BytesIO()
        _Pickler(file, self._shared).dump(cache)
        self._structure = file.getvalue()
        self._versions = [_version(value) for value in self._shared]

    @classmethod
    def of(cls, argument: object) -> object:
        """Returns `argument`, or if it is a cache what it is now.

        An object is taken for a cache if it has a method `update`, or is called a cache. Raises RuntimeError for a
        cache whose structure cannot be copied.
        """
        called_cache = "Cache" in type(argument).__name__
        if isinstance(argument, SHARED) or not (called_cache or hasattr(argument, "update")):
            return argument
        try:
            return cls(argument)
        except Exception as error:  # whatever the object's own way to be pickled raises
            if not called_cache:
                return argument
            raise RuntimeError(
                f"a block that is computed again got a {type(argument).__name__}, which cannot be copied"
                f" ({type(error).__name__}: {error}): call the model with use_cache=False"
            ) from error

    def again(self) -> object:
        """Returns a copy of the cache as it was, for one recompute.

        Raises RuntimeError where its tensors were written to in place since.
        """
        if [_version(value) for value in self._shared] != self._versions:
            raise RuntimeError(
                f"forward wrote to the tensors of a {self._name} in place, so that its block cannot be computed again:"
                " call the model with use_cache=False"
            )
        return _Unpickler(io.BytesIO(self._structure), self._shared).load()


def _version(value: object) -> int | None:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: list):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._shared = shared

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, SHARED):
            return None
        self._shared.append(value)
        return len(self._shared) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list):
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: int) -> object:
        return self._shared[number]
