"""Contexts around a module's call: in place of its forward, or by hooks outside of it."""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Callable, Iterable, Mapping
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


Opener = Callable[[tuple, Mapping], AbstractContextManager]


class ModuleContexts:
    """Opens a context around every call of some modules, given in pairs with what makes the context of the arguments.

    By module hooks, so that it lies outside of whatever replaces a module's `forward` later: activation checkpointing
    saves what enters a block inside of it. Contexts are closed when forward raises as well; torch runs no hook on a
    KeyboardInterrupt, so `close_open` closes what that left. Deepcopies of the modules open nothing.
    """

    def __init__(self, regions: Iterable[tuple[nn.Module, Opener]]):
        self._local = threading.local()
        self._handles = []
        for module, opener in regions:
            hooks = _RegionHooks(self._stack, opener)
            self._handles += [
                module.register_forward_pre_hook(_Hook(hooks.enter), with_kwargs=True),
                module.register_forward_hook(_Hook(hooks.leave), always_call=True),
            ]

    def close_open(self) -> None:
        """Closes what this thread has open."""
        _close(self._stack(), 0)

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _stack(self) -> list:
        # Hooks on saved tensors are a thread's own, and microbatches may run in threads.
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack


class _RegionHooks:
    """The pair of hooks of one module."""

    def __init__(self, stack: Callable[[], list], opener: Opener):
        self._stack = stack
        self._opener = opener

    def enter(self, module: nn.Module, arguments: tuple, keywords: dict) -> None:
        context = self._opener(arguments, keywords)
        context.__enter__()
        self._stack().append((self, context))

    def leave(self, *_: object) -> None:
        # Where another hook raised before `enter`, there is nothing to leave.
        stack = self._stack()
        mine = [depth for depth, (hooks, _) in enumerate(stack) if hooks is self]
        if mine:
            _close(stack, mine[-1])


def _close(stack: list, depth: int) -> None:
    while len(stack) > depth:
        stack.pop()[1].__exit__(None, None, None)


class _Hook:
    """Calls a function; in a copy of the module, or in one loaded from a file, does nothing."""

    def __init__(self, function: Callable | None = None):
        self._function = function

    def __call__(self, *arguments: object) -> None:
        if self._function is not None:
            self._function(*arguments)

    def __reduce__(self) -> tuple:
        return _Hook, ()
