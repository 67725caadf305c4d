"""Two ways to open a context around every call of a module.

`WrappedForward` replaces the module's `forward`. Activation checkpointing that wraps the block later recomputes the
replaced forward, so the context is open in the recompute, too: windows of weights need that.

`ModuleContexts` uses module hooks, which torch calls outside of `forward`, whoever replaces it later. The context is
open when checkpointing saves what enters the block, and is not opened again in the recompute: swapping of activations
needs that.
"""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import nn


class WrappedForward:
    """Stands in for the `forward` of a module: the same forward, inside the context that `around` returns.

    The context may give a function, which is called with the result before the context ends, and returns the result.
    A deepcopy of the module has the forward that it had before.
    """

    def __init__(self, module: nn.Module, around: Callable[[], AbstractContextManager]):
        self._module = module
        self._around = around
        self._replaced = module.__dict__.get("forward")
        self._forward = module.forward
        module.forward = self

    def __call__(self, *arguments: object, **keywords: object) -> object:
        with self._around() as finish:
            result = self._forward(*arguments, **keywords)
            return result if finish is None else finish(result)

    def remove(self) -> None:
        """Restores the forward of before. If somebody has wrapped this one, it stays, and opens no context any more."""
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


# Returns the context of a call, given its positional and its keyword arguments.
Opener = Callable[[tuple, Mapping], AbstractContextManager]


class ModuleContexts:
    """Opens a context around every call of some modules, given as pairs of a module and its opener.

    A context is closed also when forward raises an exception. torch calls no hook on a KeyboardInterrupt: `close_open`
    closes the contexts that are then still open. Deepcopies of the modules open none.
    """

    def __init__(self, openers: Iterable[tuple[nn.Module, Opener]]):
        self._local = threading.local()
        self._handles = []
        for module, opener in openers:
            hooks = _HookPair(self._stack, opener)
            self._handles += [
                module.register_forward_pre_hook(_Hook(hooks.enter), with_kwargs=True),
                module.register_forward_hook(_Hook(hooks.leave), always_call=True),
            ]

    def close_open(self) -> None:
        """Closes the contexts that this thread has open."""
        _close(self._stack(), 0)

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _stack(self) -> list:
        # A stack for each thread: hooks on saved tensors belong to a thread, and microbatches may run in threads.
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack


class _HookPair:
    """The two hooks of one module. `stack` returns the open contexts of the calling thread."""

    def __init__(self, stack: Callable[[], list], opener: Opener):
        self._stack = stack
        self._opener = opener

    def enter(self, module: nn.Module, arguments: tuple, keywords: dict) -> None:
        context = self._opener(arguments, keywords)
        context.__enter__()
        self._stack().append((self, context))

    def leave(self, *_: object) -> None:
        # If another hook raised an exception before `enter`, there is nothing to leave.
        stack = self._stack()
        own_depths = [depth for depth, (hooks, _) in enumerate(stack) if hooks is self]
        if own_depths:
            _close(stack, own_depths[-1])


def _close(stack: list, depth: int) -> None:
    while len(stack) > depth:
        stack.pop()[1].__exit__(None, None, None)


class _Hook:
    """Calls a function. A copy of it, in a copied module or in one loaded from a file, does nothing."""

    def __init__(self, function: Callable | None = None):
        self._function = function

    def __call__(self, *arguments: object) -> None:
        if self._function is not None:
            self._function(*arguments)

    def __reduce__(self) -> tuple:
        return _Hook, ()
