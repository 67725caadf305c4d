"""The class of stand-ins: to the code of a forward, a stand-in is the parameter that it stands for.

It has the class of the parameter and its attributes, and its data may be written and assigned. What only a leaf of
autograd's graph can do (a gradient, hooks on it, freezing) is refused: between forwards the parameter itself is there.
"""

from __future__ import annotations

import functools
import inspect

import torch
from torch import nn

from offload.torch_private.block_attributes import STANDS_FOR
from offload.torch_private.running_microbatch import SideBySideError, running_microbatch
from offload.torch_private.tensor_parts import STATE, wraps

# The attribute of a stand-in whose `data` was asked for.
DATA_TAKEN = "_data_was_taken"


def like_host(stand_in: torch.Tensor, host: nn.Parameter) -> torch.Tensor:
    """Gives a stand-in the class and the Python attributes of the parameter, for which its module may ask."""
    kind = class_like(type(host))
    if type(stand_in) is not kind:
        stand_in.__class__ = kind
    attributes = stand_in.__dict__
    attributes.update(host.__dict__)
    attributes[STANDS_FOR] = host
    return stand_in


def forget_data_taken(stand_in: torch.Tensor) -> None:
    """Takes back the mark of `data_was_taken`, as a window opens. Takes over attributes that the parameter has got."""
    attributes = stand_in.__dict__
    attributes.pop(DATA_TAKEN, None)
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
    return DATA_TAKEN in stand_in.__dict__


@functools.cache
def class_like(kind: type) -> type:
    """Returns a subclass of the same name, for stand-ins of parameters of class `kind`."""
    data, trains = inspect.getattr_static(kind, "data"), inspect.getattr_static(kind, "requires_grad")

    def take_data(self: torch.Tensor) -> torch.Tensor:
        self.__dict__[DATA_TAKEN] = True
        return data.__get__(self)

    def set_attribute(self: torch.Tensor, name: str, value: object) -> None:
        kind.__setattr__(self, name, value)
        if name in self.__dict__ and name != STATE:
            self.__dict__[STANDS_FOR].__dict__[name] = value

    def requires_grad_(self: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        if requires_grad != self.requires_grad:
            _refuse("is frozen or unfrozen")
        return self

    def refuse_hook(self: torch.Tensor, *_: object, **__: object) -> None:
        _refuse("gets a hook on its gradient")

    def refuse_gradient(self: torch.Tensor, *_: object) -> None:
        _refuse("is asked for its gradient")

    members = {
        "data": property(take_data, data.__set__),
        "grad": property(refuse_gradient, refuse_gradient),
        "requires_grad": property(trains.__get__, requires_grad_),
        "requires_grad_": requires_grad_,
        "register_hook": refuse_hook,
        "register_post_accumulate_grad_hook": refuse_hook,
        "retain_grad": lambda self: None,
        "__setattr__": set_attribute,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind)(kind.__name__, (kind,), members)


def _refuse(what: str) -> None:
    if running_microbatch() is not None:
        raise SideBySideError(f"a weight {what}")
    raise RuntimeError(f"a weight that streams {what} inside a forward: do it before the forward, or after the step")
