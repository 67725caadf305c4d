"""StandIn: the tensor that stands for a unit's tensor on the device, and what forwards do to it.

To the code of a forward, a stand-in is the parameter that it stands for. It has the class of the parameter and its
attributes, and its data may be written and assigned. What only a leaf of autograd's graph can do (a gradient, hooks on
it, freezing) is refused: between forwards the parameter itself is there.

A tensor that consists of several (`torch_private.tensor_parts`) has a stand-in for each slot, because to make one runs
much code of its class; a plain parameter has one for all slots.

A stand-in is joined to its host parameter in autograd's graph (`OnDevice`), so that hooks, `autograd.grad` and
`backward(inputs=)` find the parameter. Its node gets the sum of the gradients of all uses, and gives it to a
`GradientLanding`, here called the sink.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable

import torch
from torch import nn

from offload.memory.device_slots import DeviceSlot
from offload.torch_private.module_contexts import SideBySideError, running_microbatch
from offload.torch_private.recomputed_blocks import STANDS_FOR
from offload.torch_private.tensor_parts import STATE, Places, TakenApart, wraps
from offload.torch_private.torch_internals import compiles_frames, is_traced, left_out_of_graphs, set_sequence_number
from offload.weights.gradients.landing import GradientLanding
from offload.weights.units.placement import ModuleAttribute
from offload.weights.units.unit import OffloadUnit, UnitTensor

# Nodes of this number or a higher one are not put in another order by microbatches side by side.
AT_ONCE = 2**63
GONE = "backward of a forward whose offload mode is gone: keep the mode until backward has ended"


class OnDevice(torch.autograd.Function):
    """Joins a stand-in to its host parameter in autograd's graph, so that the parameter's gradients can be asked for.

    Its backward gets the sum of the gradients of all uses, as a leaf would. `accumulates` is the node that accumulates
    into the parameter, `sent_to` weak references to the sink, the unit and its tensor.
    """

    @staticmethod
    def forward(ctx, host: nn.Parameter, view: torch.Tensor, sent_to: tuple[weakref.ref, ...]) -> torch.Tensor:
        ctx.sent_to = sent_to
        ctx.set_materialize_grads(False)
        # Autograd would take the input itself for a view of it. `.data` has a version counter of its own.
        return view.data

    @staticmethod
    def backward(ctx, gradient: torch.Tensor | None) -> tuple:
        if gradient is None:
            # No use of it has one, as of a bias in a second derivative: a resident leaf gets none either.
            return None, None, None
        # What `left_out_of_graphs` does, without its call.
        if is_traced() or compiles_frames() is not None or torch.is_grad_enabled():
            return _landed(ctx, gradient), None, None
        sink, unit, tensor = ctx.sent_to
        if (to := sink()) is None:
            raise RuntimeError(GONE)
        return to.land(unit(), tensor(), gradient, ctx.accumulates), None, None


@left_out_of_graphs
def _landed(ctx, gradient: torch.Tensor) -> torch.Tensor | None:
    # With `create_graph`, operations of backward would make a graph.
    with torch.no_grad():
        return OnDevice.backward(ctx, gradient)[0]


class _Share(torch.autograd.Function):
    """The identity, whose backward runs when the gradients of all uses of its result are summed."""

    @staticmethod
    def forward(ctx, parameter: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return memory.detach()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor | None) -> tuple:
        return gradient, None


def share_of(parameter: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over `memory`, a detached `parameter`, that sums the gradients of its uses for `parameter`."""
    with torch.enable_grad():
        share = _Share.apply(parameter, memory)
    set_sequence_number(share.grad_fn, AT_ONCE)
    return share


def joined_to_host(unit: OffloadUnit, tensor: UnitTensor, view: torch.Tensor, sink: GradientLanding) -> torch.Tensor:
    """Returns a tensor over `view` whose gradient goes to `sink`, and whose node comes before that of the parameter."""
    # It may outlive the step, and must not keep the device's memory alive where a mode is dropped.
    sent_to = weakref.ref(sink), weakref.ref(unit), weakref.ref(tensor)
    with torch.inference_mode(False), torch.enable_grad():
        joined = OnDevice.apply(tensor.host, view, sent_to)
    # Kept there, because autograd makes a list of new objects whenever it is asked for the next nodes.
    joined.grad_fn.accumulates = accumulates = joined.grad_fn.next_functions[0][0]
    accumulates.register_prehook(functools.partial(_before_host_gradient, *sent_to))
    # Run as soon as it is ready, as autograd runs what accumulates gradients.
    set_sequence_number(joined.grad_fn, AT_ONCE)
    return joined


def _before_host_gradient(
    sink: Callable[[], GradientLanding | None],
    unit: Callable[[], OffloadUnit | None],
    tensor: Callable[[], UnitTensor | None],
    gradients: tuple[torch.Tensor | None, ...],
) -> None:
    if gradients[0] is not None and (to := sink()) is not None:
        to.before_host_gradient(unit(), tensor())


class StandIn:
    """The stand-in of `tensor`. `stand_ins` gives it to modules, and writes its attributes.

    `device` is the tensor on the device, in this step, and `writes` counts what forwards of this step have changed of
    it. While a window is open, `installed` has the attributes that hold a tensor of it, that tensor, and what they held
    before if that was not `tensor.host`; and `own_copy` is held in place of `device`, for a buffer that may change.

    `joined` and `joined_before` are those of a plain parameter, of this step or the last, joined in autograd's graph
    where it trains. `shares` has one for each microbatch side by side.
    """

    def __init__(self, tensor: UnitTensor):
        self.tensor = tensor
        self.device: torch.Tensor | None = None
        self.own_copy: torch.Tensor | None = None
        self.joined: torch.Tensor | None = None
        self.joined_before: torch.Tensor | None = None
        self.shares: dict[int, torch.Tensor] = {}
        self.installed: list[tuple[ModuleAttribute, torch.Tensor, torch.Tensor | None]] = []
        self.writes = 0
        self.counted_version = 0
        """autograd's version counter of `device` when it was installed, or when its changes were last counted"""
        self.slot_views: dict[int, list[torch.Tensor]] = {}
        """what `views_in` has returned, by the index of the slot"""
        # Where the tensor consists of several: those of `device`; and of each slot the stand-in there, the places of
        # its parts, and the host tensor for which it was made.
        self._parts: TakenApart | None = None
        self._kept: dict[int, tuple[TakenApart, Places, TakenApart]] = {}

    @property
    def state(self) -> tuple[int, object]:
        """A count of the weight's changes, at home and by forwards of this step, and where and how its data lies.

        It differs after each change, and after the weight got other data.
        """
        tensor = self.tensor
        if tensor.layout.is_compound:
            at_home = tensor.taken_apart
            new_writes = 0 if self.device is None else self.version - self.counted_version
            return at_home.version + self.writes + new_writes, hash(at_home.places)
        # Without further calls: backward asks for every weight.
        host, device = tensor.host, self.device
        new_writes = 0 if device is None else device._version - self.counted_version
        return host._version + self.writes + new_writes, (host.data_ptr(), host.stride())

    def views_in(self, slot: DeviceSlot) -> list[torch.Tensor]:
        """Returns `tensor.views_of` the bytes of a slot: the same objects every time."""
        views = self.slot_views.get(slot.index)
        if views is None:
            views = self.slot_views[slot.index] = self.tensor.views_of(slot.bytes)
        return views

    @property
    def parts(self) -> list[torch.Tensor]:
        """The plain tensors of which `device` consists."""
        return self._taken_apart.parts if self.tensor.layout.is_compound else [self.device]

    @property
    def _taken_apart(self) -> TakenApart:
        if self._parts is None or self._parts.tensor is not self.device:
            self._parts = TakenApart(self.device)
        return self._parts

    def look_at_parts(self) -> list[torch.Tensor]:
        """Returns the parts of `device`, to which code may have given others since they were last asked for."""
        if not self._taken_apart.is_current or not self._parts.shows_parts:
            self._parts = TakenApart(self.device)
        return self._parts.parts

    def keep_for(self, slot: DeviceSlot, made: torch.Tensor) -> None:
        """Keeps `made`, a stand-in that consists of several tensors in `slot`, for the next use of the unit there."""
        taken = self._taken_apart if made is self.device else TakenApart(made)
        if taken.shows_parts:
            self._kept[slot.index] = taken, taken.places, self.tensor.taken_apart

    def kept_for(self, slot: DeviceSlot) -> torch.Tensor | None:
        """Returns that of an earlier window, if neither it nor the host has got other attributes, parts or data."""
        kept = self._kept.get(slot.index)
        if kept is None:
            return None
        taken, places, at_home = kept
        if at_home is not self.tensor.taken_apart or not taken.is_current or taken.places != places:
            del self._kept[slot.index]
            return None
        if taken.tensor is self.device or self.device is None:
            self._parts = taken
        return taken.tensor

    def count_writes(self) -> bool:
        """Adds to `writes` the changes to `device` that are not in it yet. Returns True if there are any."""
        new_writes = self.version - self.counted_version
        self.writes += new_writes
        self.counted_version += new_writes
        return new_writes > 0

    @property
    def version(self) -> int:
        """Autograd's version counter of `device`, or the sum of those of its parts."""
        return self._taken_apart.version if self.tensor.layout.is_compound else self.device._version


class StandIns(dict[OffloadUnit, list[StandIn]]):
    """The stand-ins of each unit, in the order of its tensors."""

    def __init__(self, units: list[OffloadUnit]):
        super().__init__((unit, [StandIn(tensor) for tensor in unit.tensors]) for unit in units)

    def at(self, unit: OffloadUnit, offset: int) -> StandIn:
        """Returns that of the tensor to which byte `offset` of the unit's flat buffer belongs."""
        return self[unit][unit.index_at(offset)]


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
