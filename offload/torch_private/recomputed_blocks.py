"""A block that is computed twice: once in forward, and again in backward (activation checkpointing).

The recompute begins with what its own forward began with, or it computes something else, and it leaves what it found,
or each change is made twice:

- Attributes, parameters and random numbers (`BlockAttributes`). A forward may count its calls in an attribute, and
  between forward and backward its user may call `eval()`, change a dropout rate or end a `torch.func.functional_call`.
  The contents of a value are not kept: a list that a forward adds to has one item more.
- Buffers: running statistics, the vectors of a power iteration, counters. So the modules hold copies during a
  recompute. Under a mode that streams weights, a buffer is in its module only while a window is open on its unit.
  Windows report that with `arrived` and `leaving`. In between the buffer is left alone: its bytes may be on their way.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from offload.torch_private.buffer_states import (
    NOTHING,
    Place,
    State,
    copied,
    get,
    may_change,
    note_change,
    put,
    version,
)


@dataclass(frozen=True)
class RandomState:
    """The states of generators at one moment: those of Python and NumPy, and of torch on the host and a device."""

    python: tuple
    numpy: dict | None
    host: torch.Tensor | None = None
    device: tuple[torch.device, torch.Tensor] | None = None

    @classmethod
    def of_python(cls) -> RandomState:
        """Returns the states of Python's generator and NumPy's."""
        numpy = sys.modules.get("numpy")
        return cls(random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False))

    @classmethod
    def of(cls, device: torch.device) -> RandomState:
        """Returns the states of all generators, that of `device` among them."""
        python = cls.of_python()
        on_device = (device, torch.cuda.get_rng_state(device)) if device.type == "cuda" else None
        return cls(python.python, python.numpy, torch.get_rng_state(), on_device)

    def restore(self) -> None:
        """Gives the generators these states."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        if self.host is not None:
            torch.set_rng_state(self.host)
        if self.device is not None:
            device, state = self.device
            torch.cuda.set_rng_state(state, device)


# torch keeps these in step with the parameters, which streaming replaces.
OF_TORCH = ("_flat_weights", "_flat_weight_refs")
# The attribute of a tensor that stands in for a parameter, in a window only.
STANDS_FOR = "_stands_for"
# The factors of a LoRA layer of peft, in a dictionary: diffusers changes them around a forward with a `scale`.
SCALING = "scaling"
MISSING = object()


class BlockAttributes:
    """The attributes and parameters of a block's modules, and Python's random numbers, as a forward finds them."""

    def __init__(self, block: nn.Module):
        self._found = [(vars(module), dict(vars(module)), _own(module)) for module in block.modules()]
        factors = (found[SCALING] for _, found, _ in self._found if isinstance(found.get(SCALING), dict))
        self._found += [(each, dict(each), {}) for each in factors]
        self._random = RandomState.of_python()

    @contextmanager
    def in_recompute(self) -> Iterator[None]:
        """Returns the context of the recompute, also of one that an exception ends early."""
        here = [(attributes, dict(attributes)) for attributes, _, _ in self._found]
        random, held = RandomState.of_python(), []
        for attributes, found, parameters in self._found:
            restore(attributes, found)
            for name, tensor in parameters.items():
                now = attributes["_parameters"].get(name)
                # A block that takes gradients is computed again inside its own forward, with its window open.
                if now is not tensor and getattr(now, "__dict__", {}).get(STANDS_FOR) is not tensor:
                    held.append((attributes["_parameters"], name, now))
                    attributes["_parameters"][name] = tensor
        self._random.restore()
        try:
            yield
        finally:
            random.restore()
            for parameters, name, now in held:
                parameters[name] = now
            for attributes, now in here:
                restore(attributes, now)


def restore(attributes: dict[str, object], found: dict[str, object]) -> None:
    """Gives a module the attributes that it was found with."""
    for name in changed(attributes, found):
        if name in found:
            attributes[name] = found[name]
        else:
            del attributes[name]


def changed(attributes: dict[str, object], found: dict[str, object]) -> list[str]:
    """Returns the names of attributes that are other objects than they were found, that are new, or gone."""
    # Without a loop in Python: each recompute asks this for each of its modules.
    same = map(is_, map(found.get, attributes, repeat(MISSING)), attributes.values())
    if len(attributes) == len(found) and all(same):
        return []
    names = attributes.keys() | found.keys()
    return [
        name for name in names if name not in OF_TORCH and attributes.get(name, MISSING) is not found.get(name, MISSING)
    ]


def _own(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters that are no stand-ins: by the time of the recompute these have other memory."""
    return {
        name: tensor
        for name, tensor in module._parameters.items()
        if tensor is not None and STANDS_FOR not in getattr(tensor, "__dict__", ())
    }


class BlockBuffers:
    """The buffers of one call of `block` as its forward found them, for the recompute of that call."""

    def __init__(self, block: nn.Module):
        self._block = block
        self._places = buffers_of(block)
        self._found: dict[Place, State] = {}
        self._left: dict[Place, Tensor] = {}

    def in_forward(self) -> AbstractContextManager:
        """Returns the context of the forward.

        It raises RuntimeError at its end if a buffer has changed of which no copy was made (`may_change`).
        """
        return _Entering(lambda: _Forward(self._block, self._places, self._found, self._left))

    def in_recompute(self) -> AbstractContextManager:
        """Returns the context of the recompute, also of one that an exception ends early; it may be entered again."""
        return _Entering(self._recompute)

    def _recompute(self) -> _Recompute:
        # Buffers that forward has registered were not there when it began.
        registered = dict.fromkeys(buffers_of(self._block).keys() - self._places.keys(), NOTHING)
        return _Recompute(self._found | registered, self._left)


def arrived(places: Iterable[Place]) -> None:
    """Notes that modules hold these buffers again, where the device can use them."""
    for module, name in places:
        _away.get(module, set()).discard(name)
    for frame in _frames.entered:
        frame.arrive(places)


def leaving(places: Iterable[Place]) -> None:
    """Notes that these buffers are about to leave: they are not read or written until they arrive again."""
    for frame in reversed(_frames.entered):
        frame.leave(places)
    for module, name in places:
        _away.setdefault(module, set()).add(name)


def buffers_here(model: nn.Module) -> list[Place]:
    """Returns the places of the buffers that are not away."""
    return [(module, name) for module, name in buffers_of(model) if name not in _away.get(module, ())]


def look_again() -> None:
    """Notes that the block entered last begins only now: other forwards may have changed its buffers meanwhile."""
    if _frames.entered:
        _frames.entered[-1].look_again()


class _Forward:
    """Notes buffers in `found` as they arrive for the first time in a forward, and in `left` as they leave.

    In `found` are copies, in `left` the tensors themselves.
    """

    def __init__(self, block: nn.Module, places: Iterable[Place], found: dict[Place, State], left: dict[Place, Tensor]):
        self.places = places
        self._block = block
        self._found = found
        self._left = left
        self._here: dict[Place, tuple[State, int]] = {}
        self._missed: list[Place] = []

    def arrive(self, places: Iterable[Place]) -> None:
        here = {place: get(place) for place in places if place in self.places}
        self._here |= {place: (state, version(state)) for place, state in here.items()}
        new = {place: state for place, state in here.items() if place not in self._found and may_change(place)}
        self._found |= copied(new)

    def leave(self, places: Iterable[Place]) -> None:
        for place in places:
            if place not in self._here:
                continue
            state, before = self._here.pop(place)
            is_same = get(place) is state
            if place not in self._found and not (is_same and version(state) == before):
                self._missed.append(place)
            elif is_same and isinstance(state, Tensor):
                self._left[place] = state
            else:
                self._left.pop(place, None)

    def look_again(self) -> None:
        here = list(self._here)
        for place in here:
            self._found.pop(place, None)
        self.arrive(here)

    def end(self) -> None:
        for place in self._missed:
            note_change(place)
        if self._missed:
            names = {module: name for name, module in self._block.named_modules()}
            listed = ", ".join(f"{names[module]}.{name}".lstrip(".") for module, name in self._missed)
            raise RuntimeError(
                f"forward has changed {listed} of a {type(self._block).__name__}, a large buffer of single bytes or in"
                " eval(), and no earlier value was kept for its recompute: from now on one is, so run the step again"
            )


class _Recompute:
    """Makes modules hold copies of the states that a forward began with; each time they arrive, as they were left.

    As they leave, modules get back what they held. `left` are tensors that forward changed in place: what autograd has
    saved of the copies then has their values, as without a recompute.
    """

    def __init__(self, states: dict[Place, State], left: dict[Place, Tensor]):
        self.places = states
        self._states = states
        self._left = left
        self._held: dict[Place, tuple[State, State]] = {}

    def arrive(self, places: Iterable[Place]) -> None:
        for place, copy in copied({place: self._states[place] for place in places if place in self._states}).items():
            self._held[place] = get(place), copy
            put(place, copy)

    def leave(self, places: Iterable[Place]) -> None:
        here = [place for place in places if place in self._held]
        self._states |= copied({place: get(place) for place in here})
        for place in here:
            held, copy = self._held.pop(place)
            if get(place) is copy and place in self._left and not copy.requires_grad:
                copy.data.copy_(self._left[place])
            put(place, held)

    def look_again(self) -> None:
        pass

    def end(self) -> None:
        pass


class _Frames(threading.local):
    """The forwards and recomputes that this thread is in, from the outermost to the innermost."""

    def __init__(self) -> None:
        self.entered: list[_Forward | _Recompute] = []


_frames = _Frames()
# The names of the buffers of a module that are away.
_away: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


class _Entering(AbstractContextManager):
    """Makes a new frame whenever it is entered, and has the buffers arrive in it that are not away."""

    def __init__(self, make: Callable[[], _Forward | _Recompute]):
        self._make = make
        self._entered: list[_Forward | _Recompute] = []

    def __enter__(self) -> None:
        frame = self._make()
        frame.arrive([(module, name) for module, name in frame.places if name not in _away.get(module, ())])
        _frames.entered.append(frame)
        self._entered.append(frame)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        frame = self._entered.pop()
        frame.leave(list(frame.places))
        _frames.entered.remove(frame)
        if kind is None:
            frame.end()


def buffers_of(block: nn.Module) -> dict[Place, None]:
    """Returns the places of the buffers of a module and of those inside it."""
    return {(module, name): None for module in block.modules() for name in module._buffers}
