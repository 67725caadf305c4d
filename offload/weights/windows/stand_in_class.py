"""The class of stand-ins: to the code of a forward, a stand-in is the parameter that it stands for.

A forward may do more with a parameter than compute with it: register a hook, look at its gradient, freeze it, set an
attribute, write to its data. The stand-in passes these on to the parameter, which is there after the step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.torch_private.block_attributes import STANDS_FOR
from offload.torch_private.running_microbatch import SideBySideError, running_microbatch
from offload.torch_private.tensor_parts import STATE, wraps

# Attributes of a stand-in, besides its parameter: the mark that its `data` was asked for, and what to call before its
# gradient is read.
_DATA_TAKEN = "_data_was_taken"
_BEFORE_READ = "_before_gradient_is_read"


def like_host(
    stand_in: torch.Tensor, host: nn.Parameter, before_read: Callable[[], None] | None = None
) -> torch.Tensor:
    """Gives a stand-in the class and the Python attributes of the parameter, for which its module may ask.

    `before_read` is called before the gradient of `host` is read, which may be on its way there.
    """
    kind = class_like(type(host))
    if type(stand_in) is not kind:
        stand_in.__class__ = kind
    attributes = stand_in.__dict__
    attributes.update(host.__dict__)
    attributes[STANDS_FOR], attributes[_BEFORE_READ] = host, before_read
    return stand_in


def forget_data_taken(stand_in: torch.Tensor) -> None:
    """Takes back the mark of `data_was_taken`, as a window opens. Takes over attributes that the parameter has got."""
    attributes = stand_in.__dict__
    attributes.pop(_DATA_TAKEN, None)
    host = attributes.get(STANDS_FOR)
    # Those of a tensor that wraps others are the tensors inside it.
    if host is not None and host.__dict__ and not wraps(host):
        # But for the quantisation state, whose tensors are in the slot, too.
        attributes.update((name, value) for name, value in host.__dict__.items() if name != STATE)


def give_data(stand_in: torch.Tensor, data: torch.Tensor) -> None:
    """Assigns to `stand_in.data`, without the look at names that an assignment to a stand-in takes."""
    object.__setattr__(stand_in, "data", data)


def data_was_taken(stand_in: torch.Tensor) -> bool:
    """Tells whether code has asked for the `data` of a stand-in, through which writes raise no version counter."""
    return _DATA_TAKEN in stand_in.__dict__


@functools.cache
def class_like(kind: type) -> type:
    """Returns a subclass of the same name, for stand-ins of parameters of class `kind`."""
    data, trains = inspect.getattr_static(kind, "data"), inspect.getattr_static(kind, "requires_grad")

    def take_data(self: torch.Tensor) -> torch.Tensor:
        self.__dict__[_DATA_TAKEN] = True
        return data.__get__(self)

    def set_attribute(self: torch.Tensor, name: str, value: object) -> None:
        kind.__setattr__(self, name, value)
        if name in self.__dict__ and name != STATE:
            self.__dict__[STANDS_FOR].__dict__[name] = value

    def requires_grad_(self: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        if requires_grad != self.requires_grad:
            _freeze(self, requires_grad)
        return self

    members = {
        "data": property(take_data, data.__set__),
        "grad": property(_gradient, _set_gradient),
        "requires_grad": property(trains.__get__, requires_grad_),
        "requires_grad_": requires_grad_,
        "register_hook": _register_hook,
        "register_post_accumulate_grad_hook": _register_accumulated_hook,
        "__setattr__": set_attribute,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind)(kind.__name__, (kind,), members)


def _gradient(stand_in: torch.Tensor) -> torch.Tensor | None:
    if running_microbatch():
        raise SideBySideError("the gradient of a weight, which those before this one have not made yet, is read")
    if stand_in.__dict__[_BEFORE_READ] is not None:
        stand_in.__dict__[_BEFORE_READ]()
    gradient = stand_in.__dict__[STANDS_FOR].grad
    return None if gradient is None else gradient.to(stand_in.device)


def _set_gradient(stand_in: torch.Tensor, gradient: torch.Tensor | None) -> None:
    host = stand_in.__dict__[STANDS_FOR]
    if stand_in.__dict__[_BEFORE_READ] is not None:
        stand_in.__dict__[_BEFORE_READ]()
    host.grad = None if gradient is None else gradient.to(host.device)


def _register_hook(stand_in: torch.Tensor, hook: Callable) -> RemovableHandle:
    _refuse_side_by_side("a hook on the gradient of a weight is registered")
    return stand_in.__dict__[STANDS_FOR].register_hook(hook)


def _register_accumulated_hook(stand_in: torch.Tensor, hook: Callable) -> RemovableHandle:
    _refuse_side_by_side("a hook on the gradient of a weight is registered")
    return stand_in.__dict__[STANDS_FOR].register_post_accumulate_grad_hook(hook)


def _freeze(stand_in: torch.Tensor, trains: bool) -> None:
    """Freezes the parameter and its stand-in. What was computed with it before is not undone, as in a resident one."""
    _refuse_side_by_side("a weight is frozen or unfrozen")
    if trains:
        raise RuntimeError(
            "a weight that streams begins to train inside a forward that reads it: call requires_grad_() before the"
            " forward"
        )
    stand_in.__dict__[STANDS_FOR].requires_grad_(False)
    stand_in.detach_()


def _refuse_side_by_side(what: str) -> None:
    if running_microbatch() is not None:
        raise SideBySideError(what)
