"""A module's own forward, run inside a context."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import nn


class WrappedForward:
    """Stands in for the `forward` of a module: the same forward, inside the context that `around` opens.

    Not a pair of hooks, because activation checkpointing that wraps a block's forward afterwards must recompute
    the context with it. A deepcopy of the module has the forward that it had before.
    """

    def __init__(self, module: nn.Module, around: Callable[[], AbstractContextManager]):
        self._module = module
        self._around = around
        self._replaced = module.__dict__.get("forward")
        self._forward = module.forward
        module.forward = self

    def __call__(self, *arguments: object, **keywords: object) -> object:
        with self._around():
            return self._forward(*arguments, **keywords)

    def remove(self) -> None:
        """Puts back what was there. Someone's wrapper around this one stays, and from now on passes through."""
        if self._module.__dict__.get("forward") is not self:
            self._around = nullcontext
        elif self._replaced is None:
            del self._module.forward
        else:
            self._module.forward = self._replaced

    def __deepcopy__(self, memo: dict) -> object:
        if self._replaced is not None:
            return copy.deepcopy(self._replaced, memo)
        module = memo[id(self._module)]
        return types.MethodType(type(module).forward, module)
