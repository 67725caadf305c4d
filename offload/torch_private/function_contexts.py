"""The contexts of Python's autograd functions (`torch.autograd.Function`), as a forward makes them.

torch makes a context, which is also the function's node in the graph, each time when a function is applied, and has no
hook there. So while somebody watches, the class of all contexts has an `__init__` that notes them. To search the graph
for them instead takes nearly a tenth of the host's time for a forward.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress

from torch.autograd.function import BackwardCFunction


class FunctionContexts(threading.local):
    """Weak references to the contexts that a thread makes between `begin` and `end`, in their order."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[BackwardCFunction]] = []
        self._depth = 0

    def begin(self) -> int:
        """Begins to note; nests. Returns the index in `made` of the context that is made next."""
        self._depth += 1
        return len(self.made)

    def end(self) -> None:
        """Ends the innermost `begin`. At the end of the outermost, all that was noted is forgotten."""
        self._depth -= 1
        if not self._depth:
            self.made.clear()

    def note(self, context: BackwardCFunction) -> None:
        if self._depth:
            self.made.append(weakref.ref(context))


function_contexts = FunctionContexts()

# Reentrant, because the garbage collector may end a watch in the middle of `watch_contexts`.
_lock = threading.RLock()
_watches: set[object] = set()


def watch_contexts(owner: object) -> weakref.finalize:
    """Notes contexts, in all threads, until the returned function is called or `owner` is gone."""
    watch = object()
    with _lock:
        _watches.add(watch)
        BackwardCFunction.__init__ = _init
    end = weakref.finalize(owner, _end, watch)
    end.atexit = False
    return end


def _end(watch: object) -> None:
    with _lock:
        _watches.discard(watch)
        if not _watches:
            with suppress(AttributeError):
                del BackwardCFunction.__init__


def _init(context: BackwardCFunction) -> None:
    function_contexts.note(context)
