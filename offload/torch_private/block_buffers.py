"""The buffers of a block that is computed twice: once in forward, and again in backward (activation checkpointing).

A forward may change buffers of its module: running statistics, the vectors of a power iteration, counters. The
recompute has to start from the buffers that its own forward started from, or it computes something else; and it has to
leave them as it found them, or each change is made twice. So the modules hold copies during a recompute.

Under a mode that streams weights, a buffer is in its module only while a window is open on its unit. Windows report
that with `arrived` and `leaving`. In between the buffer is left alone: its bytes may be on their way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from weakref import WeakKeyDictionary

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
    # Scripted modules have no dictionary, and cannot be iterated over.
    return {(module, name): None for module in block.modules() for name in module._buffers.keys()}  # noqa: SIM118
