"""The contexts of Python's autograd functions (`torch.autograd.Function`), as a forward makes them.

torch makes a context, which is also the function's node in the graph, each time when a function is applied, and has no
hook there. So while somebody watches, the class of all contexts has an `__init__` that notes them. To search the graph
for them instead takes nearly a tenth of the host's time for a forward.
"""

from __future__ import annotations

import threading
import weakref

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

_lock = threading.Lock()
_watchers = 0


def watch_contexts() -> None:
    """Has contexts noted, in all threads, until `unwatch_contexts` has been called as often as this."""
    global _watchers
    with _lock:
        _watchers += 1
        BackwardCFunction.__init__ = _init


def unwatch_contexts() -> None:
    """Undoes one `watch_contexts`."""
    global _watchers
    with _lock:
        _watchers -= 1
        if not _watchers:
            del BackwardCFunction.__init__


def _init(context: BackwardCFunction) -> None:
    function_contexts.note(context)
