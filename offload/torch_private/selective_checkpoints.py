"""Selective activation checkpoints (`create_selective_checkpoint_contexts` of torch) in a forward.

Such a checkpoint sees each operation of its forward, keeps the results that its policy names, and takes them in the
recompute. It must not see the engine's own copies, which are others in the recompute, and it must not keep a view of a
slot, which has other weights by then. torch has no hook on it, so its dispatch modes are given an `__enter__` and an
`__exit__` that count them and look at what they keep.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import Tensor

from offload.torch_private.torch_internals import (
    NO_CONTEXT,
    CachedDispatchMode,
    CachingDispatchMode,
    dispatch_modes,
    pop_mode,
    push_mode,
    tree_leaves,
)


class ChecksKept(Protocol):
    """Looks at what selective checkpoints keep."""

    def check_kept(self, operation: str, result: Tensor) -> None:
        """Raises where `result`, of an operation of that name, must not be kept: the forward raises it."""


class _Here(threading.local):
    """`depth`: the selective checkpoints that are open in this thread, in their forward or in their recompute."""

    depth = 0


here = _Here()
_checking: weakref.WeakSet[ChecksKept] = weakref.WeakSet()


def check_what_is_kept(by: ChecksKept) -> None:
    """Shows `by`, as long as it lives, each result that a selective checkpoint keeps, at the end of its forward."""
    _checking.add(by)
    _watch_modes()


def hidden_from_selective_checkpoints() -> AbstractContextManager:
    """Returns a context whose operations no selective checkpoint sees."""
    return _without_selective_checkpoints() if here.depth else NO_CONTEXT


@contextmanager
def _without_selective_checkpoints() -> Iterator[None]:
    modes = [pop_mode() for _ in dispatch_modes()][::-1]
    others = [mode for mode in modes if not isinstance(mode, (CachingDispatchMode, CachedDispatchMode))]
    for mode in others:
        push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            pop_mode()
        for mode in modes:
            push_mode(mode)


@functools.cache
def _watch_modes() -> None:
    for kind in (CachingDispatchMode, CachedDispatchMode):
        kind.__enter__, kind.__exit__ = _counted(kind.__enter__), _checked(kind.__exit__)


def _counted(enter: Callable) -> Callable:
    @functools.wraps(enter)
    def enter_counted(mode: object) -> object:
        here.depth += 1
        return enter(mode)

    return enter_counted


def _checked(leave: Callable) -> Callable:
    @functools.wraps(leave)
    def leave_checked(mode: object, kind: type | None, *error: object) -> object:
        here.depth -= 1
        result = leave(mode, kind, *error)
        if kind is None and isinstance(mode, CachingDispatchMode):
            for operation, results in mode.storage.items():
                for each in tree_leaves(results):
                    value = getattr(each, "val", None)
                    for by in list(_checking) if isinstance(value, Tensor) else ():
                        by.check_kept(str(operation), value)
        return result

    return leave_checked
