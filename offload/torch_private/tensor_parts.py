"""The plain tensors of which a tensor consists.

Two kinds of tensor consist of others. A tensor subclass may wrap tensors, and says which by `__tensor_flatten__` and
`__tensor_unflatten__` (torch's traceable wrapper subclasses): a quantised weight of torchao has its integers and its
scales inside, and no memory of its own. A parameter of bitsandbytes has packed bytes as its data, and the scales in an
object, its attribute `quant_state`.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offload.torch_private.torch_internals import without_torch_function

# Addresses and strides.
Places = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
# The attribute in which bitsandbytes keeps what a packed parameter needs besides its data.
STATE = "quant_state"

_version_counter = operator.attrgetter("_version")

# The methods that return the indices of a sparse tensor, by its layout.
_ROWS, _COLUMNS = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
_INDICES = {
    torch.sparse_coo: ("indices",),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}


def places_of(tensors: Iterable[Tensor]) -> Places:
    """Returns the addresses and the strides of the data of plain tensors."""
    tensors = tuple(tensors)
    # A step asks tens of thousands of times: a comprehension takes twice as long.
    return tuple(map(Tensor.data_ptr, tensors)), tuple(map(Tensor.stride, tensors))


def wraps(tensor: Tensor) -> bool:
    """Tells whether `tensor` is of a subclass that wraps other tensors."""
    return kind_wraps(type(tensor))


def any_wraps(kinds: Iterable[type]) -> bool:
    """Tells whether a class among `kinds`, as a dispatch mode gets them, wraps other tensors."""
    return any(map(kind_wraps, kinds))


def state_of(tensor: Tensor) -> object | None:
    """Returns the quantisation state that hangs on a packed parameter, or None."""
    return tensor.__dict__.get(STATE) if type(tensor) is not Tensor else None


def is_compound(tensor: Tensor) -> bool:
    """Tells whether `tensor` consists of several plain tensors, in either way."""
    return wraps(tensor) or state_of(tensor) is not None


def parts(tensor: Tensor) -> list[Tensor]:
    """Returns the plain tensors of which `tensor` consists: itself, where it is a plain one."""
    if wraps(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in parts(getattr(tensor, name))]
    state = state_of(tensor)
    return [tensor] if state is None else [tensor, *tensors_in(state)]


@dataclass(frozen=True)
class Wrapping:
    """A tensor that wraps others, without their memory: `inner` has something in place of each, by name."""

    kind: type
    context: object
    shape: torch.Size
    strides: tuple[int, ...]
    inner: dict[str, object]

    @classmethod
    def of(cls, tensor: Tensor, kept: Callable[[Tensor], object]) -> Wrapping:
        """Takes `tensor` apart; `kept` of a tensor that it wraps, which may wrap others, is what stands for that."""
        names, context = tensor.__tensor_flatten__()
        inner = {name: kept(getattr(tensor, name)) for name in names}
        return cls(type(tensor), context, tensor.shape, tensor.stride(), inner)

    def around(self, restored: Callable[[object], Tensor]) -> Tensor:
        """Returns such a tensor; `restored` of what stands for a tensor inside it is that tensor."""
        inner = {name: restored(kept) for name, kept in self.inner.items()}
        return self.kind.__tensor_unflatten__(inner, self.context, self.shape, self.strides)


class TakenApart:
    """The `parts` of a tensor that consists of several, and whether it has got others since.

    Attributes:
        shows_parts: `is_current` sees each part that is replaced; False where a list, or code of its class, holds one.
    """

    def __init__(self, tensor: Tensor):
        self.tensor, self.parts = tensor, parts(tensor)
        self._counted = (tensor, *self.parts)
        self._held = [(attributes, list(attributes.values())) for attributes in _attributes_of(tensor, set())]
        seen = {id(tensor)}.union(id(value) for _, values in self._held for value in values)
        self.shows_parts = seen.issuperset(map(id, self.parts))

    @property
    def is_current(self) -> bool:
        """True if no attribute of the tensor, of its state or of a tensor that it wraps was assigned since."""
        # A generator would take longer than what it does.
        for attributes, values in self._held:
            if len(attributes) != len(values) or not all(map(operator.is_, attributes.values(), values)):
                return False
        return True

    @property
    def version(self) -> int:
        """The sum of autograd's version counters of the tensor and its parts."""
        return versions_of(self._counted)

    @property
    def places(self) -> Places:
        """The addresses and the strides of all parts' data."""
        return places_of(self.parts)


def true_bytes(tensor: Tensor) -> int:
    """Returns the bytes of the parts of `tensor`.

    The own `nbytes` of a quantised weight and of a sparse matrix are those of what it stands for, or an error.
    """
    if tensor.layout in _INDICES:
        held = tensor.detach()
        held = held.coalesce() if tensor.is_sparse else held
        return held.values().nbytes + sum(getattr(held, name)().nbytes for name in _INDICES[tensor.layout])
    return sum(part.nbytes for part in parts(tensor)) if is_compound(tensor) else tensor.nbytes


def lies_flat(tensor: Tensor) -> bool:
    """Tells whether the bytes of `tensor`, or of its parts, can be laid into a flat buffer and read from there."""
    return wraps(tensor) or (tensor.layout is torch.strided and not tensor.is_quantized)


def is_as_stored(tensor: Tensor) -> bool:
    """Tells whether the values of `tensor` are the bytes in its memory: it is plain, no lazy conjugate or negative."""
    return type(tensor) is Tensor and not tensor.is_conj() and not tensor.is_neg()


def version_of(tensor: Tensor) -> int:
    """Returns the sum of autograd's version counters of the tensor and its parts; without those in inference mode."""
    if not is_compound(tensor):
        return 0 if tensor.is_inference() else tensor._version
    return versions_of((tensor, *parts(tensor)))


def versions_of(tensors: Collection[Tensor]) -> int:
    """Returns the sum of autograd's version counters; without those of tensors of inference mode."""
    with without_torch_function():
        try:
            return sum(map(_version_counter, tensors))
        except RuntimeError:
            # Tensors of inference mode have none. They are rare, and a step asks thousands of times.
            return sum([each._version for each in tensors if not each.is_inference()])


def wrapped(tensor: Tensor, memory: Iterable[Tensor]) -> Tensor:
    """Returns a tensor that wraps `memory`, which has a tensor for each part of `tensor`, as `tensor` wraps its own."""
    return _wrapped(tensor, iter(memory))


def dressed(new: Tensor, like: Tensor) -> Tensor:
    """Makes `new`, which wraps tensors, a parameter if `like` is one. Gives it the attributes of `like` that it lacks.

    Its class cannot be changed afterwards, as that of a plain tensor can: it has a table of operations.
    """
    if isinstance(like, nn.Parameter):
        # What nn.Parameter does, without the second tensor that it would make by `detach`.
        new.requires_grad_(False)
        new._is_param = True
    for name, value in like.__dict__.items():
        new.__dict__.setdefault(name, value)
    return new


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yields the tensors in a value: in sequences, dictionaries and attributes of plain objects, nested as they are."""
    found: list[Tensor] = []
    mapped(value, lambda tensor: found.append(tensor) or tensor)
    yield from found


def replaced_in(value: object, memory: Iterable[Tensor]) -> object:
    """Returns a copy of `value` that has the tensors of `memory` in place of its own, in the order of `tensors_in`."""
    new = iter(memory)
    return mapped(value, lambda tensor: next(new))


def mapped(value: object, change: Callable[[Tensor], object]) -> object:
    """Returns `value` with `change` of each of its tensors in their place; itself, where nothing changes.

    Modules and what they have are left out, and so is an object that is met inside itself. Each object is looked into
    once, however often it is met.
    """
    return _mapped(value, change, {})


def give_state(tensor: Tensor, memory: Iterable[Tensor]) -> None:
    """Makes the tensors of `memory` those of the parameter's state. The object stays: its module has it as well."""
    state = state_of(tensor)
    state.__dict__.update(replaced_in(state, memory).__dict__)


def _attributes_of(value: object, seen: set[int]) -> Iterator[dict[str, object]]:
    """Yields the attributes of a tensor or state, then those of the objects among them that may hold parts."""
    is_plain = isinstance(value, Tensor) and not is_compound(value)
    is_other = callable(value) and not isinstance(value, Tensor)
    attributes = getattr(value, "__dict__", None)
    if is_plain or is_other or not isinstance(attributes, dict) or id(value) in seen:
        return
    seen.add(id(value))
    yield attributes
    for inner in list(attributes.values()):
        yield from _attributes_of(inner, seen)


@functools.cache
def kind_wraps(kind: type) -> bool:
    """Tells whether `kind` is such a subclass."""
    return kind not in (Tensor, nn.Parameter) and hasattr(kind, "__tensor_flatten__")


def _wrapped(tensor: Tensor, memory: Iterator[Tensor]) -> Tensor:
    if not wraps(tensor):
        return next(memory)
    names, context = tensor.__tensor_flatten__()
    inner = {name: _wrapped(getattr(tensor, name), memory) for name in names}
    with torch.no_grad():
        return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def _mapped(value: object, change: Callable[[Tensor], object], seen: dict[int, object]) -> object:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (nn.Module, type)):
        return value
    if id(value) not in seen:
        # Met again inside itself, it stays.
        seen[id(value)] = value
        seen[id(value)] = _mapped_object(value, change, seen)
    return seen[id(value)]


def _mapped_object(value: object, change: Callable[[Tensor], object], seen: dict[int, object]) -> object:
    if type(value) in (list, tuple):
        items = [_mapped(item, change, seen) for item in value]
        return value if _same(items, value) else type(value)(items)
    if type(value) is dict:
        items = {key: _mapped(item, change, seen) for key, item in value.items()}
        return value if _same(items.values(), value.values()) else items
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or callable(value):
        return value
    new = {name: _mapped(item, change, seen) for name, item in attributes.items()}
    if _same(new.values(), attributes.values()):
        return value
    changed = copy.copy(value)
    changed.__dict__.update(new)
    return changed


def _same(new: Iterable[object], old: Iterable[object]) -> bool:
    return all(one is other for one, other in zip(new, old, strict=True))
