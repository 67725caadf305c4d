"""Surrounds every call of a module, in two ways, runs a function before it, and tells which thread may run a forward.

`WrappedForward` replaces the module's `forward`. Activation checkpointing that wraps the block later recomputes the
replaced forward, so what surrounds it is there in the recompute, too: windows of weights need that.

`ModuleContexts` uses module hooks, which torch calls outside of `forward`, whoever replaces it later. The context is
open when checkpointing saves what enters the block, and is not opened again in the recompute: swapping of activations
needs that.

Several microbatches run side by side in threads of their own, by turns (`running_microbatch`). All other forwards of a
model under a mode take turns too (`OneThread`), because they share its slots and its record of the step.
"""

from __future__ import annotations

import copy
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.torch_private.torch_internals import compiles_frames, is_in_backward, is_traced, left_out_of_graphs


class ReplacedForward(ABC):
    """Stands in for the `forward` of a module: calls `run` in its place, which torch.compile leaves as it is.

    Copies and files of the module (deepcopy, `torch.save`) have the forward that it had before. `computes_again` is
    True where backward computes it a second time.
    """

    computes_again = False

    def __init__(self, module: nn.Module):
        self._module = module
        self._replaced = vars(module).get("forward")
        # The second name is the one by which `inspect.signature` finds the arguments that the forward takes.
        self._found = self.__wrapped__ = module.forward
        self._kind = type(module)
        vars(module)["forward"] = self
        _State.of(module).add(self)

    @abstractmethod
    def run(self, *arguments: object, **keywords: object) -> object:
        """Returns the result of a call of the module."""

    def __call__(self, *arguments: object, **keywords: object) -> object:
        # What `left_out_of_graphs` does, without its call.
        if is_traced() or compiles_frames() is not None:
            return _run(self, arguments, keywords)
        return self.run(*arguments, **keywords)

    @property
    def __code__(self) -> types.CodeType:
        # torch.jit.script and torch.export ask for it, or for the globals.
        raise AttributeError(
            f"the forward of {self._kind.__name__} is replaced by an offload mode or by recompute(), and cannot be"
            " scripted or exported: script or export a copy of the module (copy.deepcopy)"
        )

    __globals__ = __code__

    @property
    def _forward(self) -> Callable:
        """The forward of before; that of the class which the module has now, where it was given another."""
        if self._replaced is None and type(self._module) is not self._kind:
            return types.MethodType(type(self._module).forward, self._module)
        return self._found

    def remove(self) -> None:
        """Restores the forward of before. If somebody has wrapped this one, it stays, and is that forward."""
        found = vars(self._module)
        if found.get("forward") is not self:
            self.run = self._forward
        elif self._replaced is None:
            del found["forward"]
        else:
            found["forward"] = self._replaced
        _State.of(self._module).remove(self)

    @property
    def replaced(self) -> Callable | None:
        """The forward that was in the module's `__dict__` before; None for that of its class."""
        return self._replaced

    def __deepcopy__(self, memo: dict) -> object:
        # Asked for this where somebody else's object holds it, or where the class copies itself in its own way.
        if self._replaced is not None:
            return copy.deepcopy(self._replaced, memo)
        module = memo[id(self._module)]
        return types.MethodType(type(module).forward, module)


@left_out_of_graphs
def _run(forward: ReplacedForward, arguments: tuple, keywords: dict) -> object:
    return forward.run(*arguments, **keywords)


def check_recompute_is_outside(model: nn.Module) -> None:
    """Raises RuntimeError in one line for a module of `model` that has buffers of its own and is computed again.

    What replaces its forward later would not be there in the recompute, which would change the buffers a second time.
    """
    for name, module in model.named_modules():
        if module._buffers and getattr(vars(module).get("forward"), "computes_again", False):
            raise RuntimeError(
                f"{name or type(module).__name__} has buffers of its own, and recompute() was called before the mode"
                " was attached: call it afterwards"
            )


# Their kernels write buffers without a version counter, also in eval().
OBSERVERS = "torch.ao.quantization"


def check_all_is_seen(model: nn.Module) -> None:
    """Raises ValueError in one line for a module of `model` of which a mode does not see all that it does.

    Such are those that `torch.jit` has scripted or traced, and the observers of torch.ao.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{name or module.original_name} is a scripted module, of which a mode sees neither calls nor reads:"
                " leave torch.jit out, or take torch.compile in its place"
            )
        if type(module).__module__.startswith(OBSERVERS):
            raise ValueError(
                f"{name or type(module).__name__} is an observer of {OBSERVERS}, which writes buffers unseen by a mode:"
                " take the quantisation-aware training of torchao in its place"
            )


# Runs a forward with its positional and its keyword arguments, and returns the result.
Runner = Callable[[Callable, tuple, dict], object]


class WrappedForward(ReplacedForward):
    """The same forward, run by `runner`. It is a function and no context: thousands of them are called in a step."""

    def __init__(self, module: nn.Module, runner: Runner):
        super().__init__(module)
        self._runner = runner

    def run(self, *arguments: object, **keywords: object) -> object:
        # `_forward`, without the call.
        is_found = self._replaced is not None or type(self._module) is self._kind
        return self._runner(self._found if is_found else self._forward, arguments, keywords)


class OwnHook:
    """A hook of this package on a module: `register` is the method of the module that registers it.

    Copies and files of the module do not have it.
    """

    def __init__(
        self, module: nn.Module, register: Callable[..., RemovableHandle], function: Callable, **options: object
    ):
        self._module = module
        self._handle = register(_Hook(function), **options)
        _State.of(module).add(self)

    @property
    def place(self) -> tuple[int, list[dict | None]]:
        """The number of the hook, and the module's dictionaries that have an entry under it."""
        return self._handle.id, [find() for find in (self._handle.hooks_dict_ref, *self._handle.extra_dict_ref)]

    def remove(self) -> None:
        """Removes the hook."""
        self._handle.remove()
        _State.of(self._module).remove(self)


class _State:
    """`__getstate__` of a module: its state, without what this package has put into it.

    So a deepcopy or a file of a model under a mode is a plain model, and reading the file does not need this package.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self._added: list[ReplacedForward | OwnHook] = []

    @classmethod
    def of(cls, module: nn.Module) -> _State:
        """Returns that of `module`, and makes it where there is none."""
        return vars(module).setdefault("__getstate__", cls(module))

    def add(self, added: ReplacedForward | OwnHook) -> None:
        """Leaves `added` out from now on."""
        self._added.append(added)

    def remove(self, added: ReplacedForward | OwnHook) -> None:
        """Forgets `added`, which is no longer there; with the last one goes this object."""
        self._added.remove(added)
        if not self._added:
            del vars(self._module)["__getstate__"]

    def __call__(self) -> object:
        state = type(self._module).__getstate__(self._module)
        if not isinstance(state, dict):
            # The class saves itself in a way of its own.
            return state
        state = {name: value for name, value in state.items() if value is not self}
        while isinstance(forward := state.get("forward"), ReplacedForward):
            if forward.replaced is None:
                del state["forward"]
            else:
                state["forward"] = forward.replaced
        own = [hook.place for hook in self._added if isinstance(hook, OwnHook)]
        for name, value in state.items():
            numbers = {number for number, dictionaries in own if any(found is value for found in dictionaries)}
            if numbers:
                state[name] = type(value)((key, item) for key, item in value.items() if key not in numbers)
        return state

    def __deepcopy__(self, memo: dict) -> Callable:
        module = memo[id(self._module)]
        return types.MethodType(type(module).__getstate__, module)


# Returns the context of a call, given its positional and its keyword arguments.
Opener = Callable[[tuple, Mapping], AbstractContextManager]


class ModuleContexts:
    """Opens a context around every call of some modules, given as pairs of a module and its opener.

    It is closed also after an exception; torch calls no hook on a KeyboardInterrupt: `close_open` closes what is open
    then. Copies of the modules open none. `outermost`: hooks that a module has already run inside its context. Raises
    torch's RuntimeError, leaving no hook, for a scripted module.
    """

    def __init__(self, openers: Iterable[tuple[nn.Module, Opener]], outermost: bool = False):
        self._local = threading.local()
        self._hooks: list[OwnHook] = []
        try:
            for module, opener in openers:
                enter, leave = module.register_forward_pre_hook, module.register_forward_hook
                pair = _HookPair(self._stack, opener)
                self._hooks.append(OwnHook(module, enter, pair.enter, with_kwargs=True, prepend=outermost))
                self._hooks.append(OwnHook(module, leave, pair.leave, always_call=True))
        except BaseException:
            self.remove()
            raise

    def close_open(self) -> None:
        """Closes the contexts that this thread has open."""
        _close(self._stack(), 0)

    def remove(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _stack(self) -> list:
        # A stack for each thread: hooks on saved tensors belong to a thread, and microbatches may run in threads.
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack


def before_each_call(modules: Iterable[nn.Module], function: Callable[[], None]) -> Callable[[], None]:
    """Calls `function` before every call of `modules`, before other hooks. Returns the function that ends it.

    Copies of the modules do not call it.
    """
    handles = [
        OwnHook(module, module.register_forward_pre_hook, lambda *_: function(), prepend=True) for module in modules
    ]

    def remove() -> None:
        while handles:
            handles.pop().remove()

    return remove


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
    """Calls a function. A copy of it, in a copy of a module whose class copies itself in its own way, does nothing."""

    def __init__(self, function: Callable | None = None):
        self._function = function

    @left_out_of_graphs
    def __call__(self, *arguments: object) -> None:
        if self._function is not None:
            self._function(*arguments)

    def __reduce__(self) -> tuple:
        return _Hook, ()


class SideBySideError(RuntimeError):
    """Raised for what code does with `what` while microbatches run side by side, and each would see it of others.

    The mode runs them one after another from then on.
    """

    def __init__(self, what: str):
        super().__init__(
            f"{what} in a loss while several microbatches run side by side: one after another they would compute"
            " something else. From now on this mode runs them one after another: clear the gradients and run the step"
            " again"
        )


class _Running(threading.local):
    number: int | None = None


_running = _Running()


def running_microbatch() -> int | None:
    """Returns the number of the microbatch whose forward runs in this thread; None where there are no others."""
    return _running.number


@contextmanager
def running(number: int) -> Iterator[None]:
    """Notes that this thread runs the forward of microbatch `number` inside the block."""
    before, _running.number = _running.number, number
    try:
        yield
    finally:
        _running.number = before


class OneThread:
    """Refuses forwards of a second thread while one runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Surrounds the outermost forward of a thread. Raises RuntimeError while another runs one.

        Microbatches side by side take turns by themselves; a recompute may run in a thread of autograd.
        """
        if running_microbatch() is not None or is_in_backward():
            yield
            return
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "two threads run forwards of one model at the same time, which an offload mode cannot keep apart: let"
                " them take turns (threading.Lock), or give each a copy of the model"
            )
        try:
            yield
        finally:
            self._lock.release()
