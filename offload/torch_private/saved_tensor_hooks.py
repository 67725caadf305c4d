"""Watches what is kept for backward: hooks on saved tensors of one thread, selective checkpoints, functions' contexts.

Autograd calls one pair of hooks (pack, unpack) at a time: the innermost. The pairs of this package still work inside
each other, because a pack function (`PackHook`) carries attributes that tell the pair inside it what to do:

- `owner`: the object whose hooks they are, by which the object finds out that its hooks are open already;
- `outer`: the pair outside of this one, or None;
- `claims`: a function of a tensor, True for the tensors that this pair saves whatever pair stands inside it.

Two others keep tensors for backward where no hook sees it. A selective activation checkpoint
(`create_selective_checkpoint_contexts` of torch) sees each operation of its forward, keeps the results that its policy
names, and takes them in the recompute. It must not see the engine's own copies, which are others in the recompute, and
it must not keep a view of a slot, which has other weights by then. So its dispatch modes are given an `__enter__` and
an `__exit__` that count them and look at what they keep. And a Python function (`torch.autograd.Function`) may keep a
tensor as an attribute of its context, which is also its node in the graph. So while somebody watches, the class of all
contexts has an `__init__` that notes them. To search the graph for them instead takes nearly a tenth of the host's time
for a forward.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from offload.torch_private.torch_internals import (
    NO_CONTEXT,
    CachedDispatchMode,
    CachingDispatchMode,
    compiles_frames,
    dispatch_modes,
    innermost_saved_tensor_hooks,
    is_checkpoint_pack,
    is_traced,
    left_out_of_graphs,
    pop_mode,
    push_mode,
    tree_leaves,
)

Hooks = tuple[Callable, Callable]


class PackHook:
    """A pack function with the attributes above. torch.compile leaves it out of its graphs."""

    def __init__(
        self,
        pack: Callable[[torch.Tensor], object],
        owner: object,
        outer: Hooks | None = None,
        claims: Callable[[torch.Tensor], bool] | None = None,
    ):
        self.pack = pack
        self.owner = owner
        if claims is not None:
            self.outer, self.claims = outer, claims

    def __call__(self, tensor: torch.Tensor) -> object:
        # What `left_out_of_graphs` does, without its call.
        if is_traced() or compiles_frames() is not None:
            return _packed(self, tensor)
        return self.pack(tensor)


@left_out_of_graphs
def _packed(hook: PackHook, tensor: torch.Tensor) -> object:
    return hook.pack(tensor)


class Kept(NamedTuple):
    """A saved tensor that stays where it is, with the version that autograd would check."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kept:
        # Detached, it shares memory and version with the original. The original may be the result of the operation
        # that saves it, and would keep that operation alive, which keeps what the hook returns: neither would ever go.
        return cls(tensor.detach(), tensor._version)

    def checked(self) -> torch.Tensor:
        """Returns the tensor. Raises RuntimeError if it was modified since it was saved."""
        tensor = self.tensor
        if tensor._version != self.version:
            check_version(tensor._version, self.version, tensor.dtype, tensor.shape)
        return tensor


class Passed(NamedTuple):
    """The result of other hooks' pack function, with their unpack function."""

    packed: object
    unpack: Callable

    @classmethod
    def to(cls, hooks: Hooks, tensor: torch.Tensor) -> Passed:
        return cls(hooks[0](tensor), hooks[1])


def check_version(current: int, saved: int, dtype: torch.dtype, shape: torch.Size) -> None:
    """Raises RuntimeError, as autograd does without hooks, if a tensor was modified since it was saved."""
    if current != saved:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" a {dtype} tensor of shape {tuple(shape)} is at version {current}, saved at version {saved}"
        )


def active_hooks() -> Hooks | None:
    """Returns the innermost hooks of this thread."""
    return innermost_saved_tensor_hooks(True)


def beneath_claims(hooks: Hooks | None) -> Hooks | None:
    """Returns the innermost pair, of `hooks` and those outside of it, that does not only save what it claims."""
    while hooks is not None and hasattr(hooks[0], "claims"):
        hooks = hooks[0].outer
    return hooks


def claimed(hooks: Hooks | None, tensor: torch.Tensor) -> bool:
    """Returns whether `hooks`, or claiming hooks outside of them, claim `tensor`."""
    while hooks is not None and hasattr(hooks[0], "claims"):
        if hooks[0].claims(tensor):
            return True
        hooks = hooks[0].outer
    return False


def leave_weights_uncounted() -> None:
    """Notes that the checkpoint whose hooks are innermost does without the weights that a mode saves.

    Its recompute then ends at the last other tensor, and does not begin where only weights were saved.
    """
    hooks = active_hooks()
    if hooks is not None:
        hooks[0].counts_no_weights = True


def counting_checkpoint(hooks: Hooks | None) -> Hooks | None:
    """Returns the hooks of torch's checkpoint if it is the first, from `hooks` outwards, that saves what is unclaimed.

    It has to be told of the weights that a mode saves, too; of those that do without (above) the answer is None.
    """
    around = beneath_claims(hooks)
    if around is None or hasattr(around[0], "counts_no_weights") or not is_checkpoint_pack(around[0]):
        return None
    return around


class _Here(threading.local):
    """`depth`: the selective checkpoints that are open in this thread, in their forward or in their recompute."""

    depth = 0


here = _Here()
_checking: weakref.WeakSet = weakref.WeakSet()


def check_what_is_kept(by: object) -> None:
    """Calls `by.check_kept(name of an operation, its result)` for each result that a selective checkpoint keeps.

    That is at the end of the forward, which raises what it raises, and as long as `by` lives.
    """
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
