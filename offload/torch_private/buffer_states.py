"""The states of buffers: what a module holds under a name, copies of it, and which of them a forward may change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from offload.torch_private.tensor_parts import true_bytes, version_of, wraps

# The module that holds a buffer, and its name there.
Place = tuple[nn.Module, str]
# Buffers of at most this many bytes are copied whether they change or not.
SMALL_BYTES = 2**16


class _Nothing(Enum):
    """The state of a place where no buffer is registered."""

    NOTHING = None


NOTHING = _Nothing.NOTHING
State = Tensor | None | _Nothing

# The names of large buffers that were seen to change where it was not expected.
_changing: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def get(place: Place) -> State:
    """Returns what the module holds."""
    module, name = place
    return module._buffers.get(name, NOTHING)


def put(place: Place, state: State) -> None:
    """Makes the module hold `state`."""
    module, name = place
    if state is NOTHING:
        module._buffers.pop(name, None)
    else:
        module._buffers[name] = state


def version(state: State) -> int:
    """Returns autograd's version counter of a state; 0 for one that has none."""
    return version_of(state) if isinstance(state, Tensor) else 0


def copied(states: Mapping[Place, State]) -> dict[Place, State]:
    """Returns copies of states; places that share a tensor share its copy.

    A tensor in autograd's graph, as a recurrent state may be, is returned itself: it has to stay in the graph.
    """
    copies: dict[int, State] = {}
    for state in states.values():
        if id(state) not in copies:
            is_copied = isinstance(state, Tensor) and not state.requires_grad
            copies[id(state)] = state.detach().clone() if is_copied else state
    return {place: copies[id(state)] for place, state in states.items()}


def changes_unseen(tensor: Tensor, training: bool) -> bool:
    """Tells whether a buffer, of a module that is `training`, may be written in ways that raise no version counter.

    Kernels of running statistics write so, and code that goes through `.data` or NumPy, as for codebooks. Quantised
    weights and masks, a byte an element or less, are not written so.
    """
    return tensor.is_inference() or (training and tensor.dtype.itemsize > 1 and not wraps(tensor))


def may_change(place: Place) -> bool:
    """Tells whether a forward may change a buffer: a small one, one that changes unseen, and one that has changed.

    Large masks, quantised weights and large buffers in eval() are not expected to change.
    """
    (module, name), state = place, get(place)
    if not isinstance(state, Tensor) or true_bytes(state) <= SMALL_BYTES:
        return True
    return changes_unseen(state, module.training) or name in _changing.get(module, ())


def note_change(place: Place) -> None:
    """Notes that a buffer has changed which was not expected to."""
    module, name = place
    _changing.setdefault(module, set()).add(name)


@contextmanager
def own_copies(places: Iterable[Place]) -> Iterator[None]:
    """Makes modules hold copies of the buffers that may change; afterwards the buffers have the values of the copies.

    What autograd saves of them inside the block stays as the block leaves it.
    """
    tensors = {place: get(place) for place in places if may_change(place)}
    tensors = {place: state for place, state in tensors.items() if isinstance(state, Tensor)}
    copies = copied(tensors)
    for place, copy in copies.items():
        put(place, copy)
    try:
        yield
    finally:
        for place, copy in copies.items():
            # A buffer that was resized is another tensor from now on.
            if get(place) is copy and copy.shape == tensors[place].shape:
                put(place, tensors[place])
                write_back(tensors[place], copy)


def write_back(tensor: Tensor, copy: Tensor) -> None:
    """Gives a buffer the values of its copy, as a change that is seen if that of the copy was."""
    if copy is not tensor:
        with torch.no_grad():
            (tensor if version(copy) else tensor.data).copy_(copy)
