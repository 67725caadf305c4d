"""Counts the memory and the operations of a step on tensors of the meta device, which have shapes and no memory.

What operations make and cost is kept by the shapes of their arguments. torch computes many shapes in Python, which was
half of the time of a plan. Blocks are alike: the operations of the first are computed, and those of the others get new
tensors of the same shapes.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from offload.activations.tiles import counted
from offload.torch_private.tensor_parts import any_wraps
from offload.torch_private.torch_internals import (
    OpOverload,
    UncompiledMode,
    overload_name,
    overload_packet,
    storage_address,
)

# Arguments that are compared by their value.
PLAIN = frozenset({bool, int, float, str, torch.dtype, torch.layout, torch.device, torch.memory_format, type(None)})
# The result lies in memory of the arguments, or is not known: it is computed each time.
SHARES, UNKNOWN = "shares", "unknown"


class Operation(NamedTuple):
    """An operation on arguments of certain shapes: what it costs, and what it returns.

    `flops` are those of a product, None for another operation, which reads and writes `memory_bytes`; `copied_bytes`
    are those of a copy, None for another operation.
    `result` is new tensors (is it one, shapes, strides and dtypes), the argument of a number, `SHARES` or `UNKNOWN`.
    """

    flops: float | None
    copied_bytes: int | None
    memory_bytes: int
    result: tuple[bool, list[tuple]] | int | str


_KNOWN: dict[tuple, Operation] = {}


def known_or_computed(
    function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Sequence[Tensor], Operation]:
    """Returns `function(*args, **kwargs)`, the tensors in it that have memory of their own, and what is known of it.

    It is an operation that a TorchDispatchMode got; a known one is not computed. autograd counts versions before the
    mode gets an operation: one that only writes is known by what it returns.
    """
    key = _key(function, args, kwargs)
    known = _KNOWN.get(key)
    if known is None:
        return _computed(function, args, kwargs, key)
    recipe = known.result
    if recipe is SHARES:
        return function(*args, **kwargs), (), known
    if recipe is UNKNOWN:
        return _computed(function, args, kwargs, None)
    if isinstance(recipe, int):
        return list(tensors_in((args, *kwargs.values())))[recipe], (), known
    single, shapes = recipe
    made = tuple([torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in shapes])
    return made[0] if single else made, made, known


def tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """Yields the meta tensors in arguments or results: operators nest tensors in sequences only.

    torch's `tree_leaves`, which knows all containers, takes a tenth of the time of a plan.
    """
    for value in values:
        if isinstance(value, Tensor):
            if value.is_meta and value.layout is torch.strided:
                yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def _key(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple | None:
    """Returns what decides the shapes of results; None where that is more than is known here."""
    parts: list[Any] = [function]
    if isinstance(function, OpOverload) and _describe(args, parts) and (not kwargs or _describe(kwargs.items(), parts)):
        return tuple(parts)
    return None


def _describe(values: Iterable[Any], parts: list[Any]) -> bool:
    """Adds `values` to `parts`; returns whether all are of those that are known here."""
    for value in values:
        kind = type(value)
        if kind in PLAIN:
            # With the type, because 1, 1.0 and True are equal.
            parts += (kind, value)
        elif isinstance(value, Tensor):
            if not value.is_meta or value.layout is not torch.strided:
                return False
            parts += (value.shape, value.stride(), value.dtype)
        elif isinstance(value, (tuple, list)):
            parts.append(len(value))
            if not _describe(value, parts):
                return False
        else:
            return False
    return True


def _computed(
    function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], key: tuple | None
) -> tuple[Any, Sequence[Tensor], Operation]:
    """Computes the operation, and keeps what is the same for all of its `key`, where it has one."""
    given = list(tensors_in((args, *kwargs.values())))
    before = list(map(storage_of, given))
    result = function(*args, **kwargs)
    read = list(map(storage_of, given))
    # A view, or a tensor updated in place, is no new memory.
    made = [tensor for tensor in tensors_in((result,)) if storage_of(tensor) not in read]
    copied_bytes = result.nbytes if overload_packet(function) is torch.ops.aten.copy_ else None
    formula, flops = flop_registry.get(overload_packet(function)), None
    if formula is not None:
        # The dtype of a wider result is an argument where the formulas expect a shape.
        has_dtype = overload_name(function).startswith("dtype")
        operands = [argument for argument in args if isinstance(argument, Tensor)] if has_dtype else args
        flops = formula(*operands, **kwargs, out_val=result)
    unchanged = key is not None and read == before and key == _key(function, args, kwargs)
    recipe = _recipe(result, given, made) if unchanged else UNKNOWN
    product = flops is not None or copied_bytes is not None
    found = Operation(flops, copied_bytes, 0 if product else _bytes_moved(function, given, result, made), recipe)
    if key is not None:
        _KNOWN[key] = found
    return result, made, found


def _recipe(result: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> Any:
    """Returns how to make `result` of an operation on `given`, of which `made` is new memory."""
    if (index := next((n for n, tensor in enumerate(given) if tensor is result), None)) is not None:
        return index
    results = (result,) if isinstance(result, Tensor) else result
    if not isinstance(results, tuple) or not all(type(each) is Tensor and each.is_meta for each in results):
        return UNKNOWN
    if not made:
        # Not by the schema: that of `_unsafe_view` does not say that it returns the memory of its argument.
        return SHARES
    shapes = [(each.shape, each.stride(), each.dtype) for each in results]
    alone = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in shapes]
    sizes, needed = ([each.untyped_storage().nbytes() for each in tensors] for tensors in (results, alone))
    new = len(set(map(storage_of, results))) == len(results) == len(made) and sizes == needed
    return (results is not result, shapes) if new else UNKNOWN


def storage_of(tensor: Tensor) -> int:
    """Returns what identifies the memory of `tensor` while it lives."""
    return storage_address(tensor.untyped_storage())


# Products with a rate of their own: those of experts (`grouped_mm`), and the two of attention.
KINDS = ("grouped", "attention")
# What a FLOP of each kind costs, where all cost the same.
EVEN: Mapping[str, float] = {}
# torch's CUDA allocator rounds sizes to multiples of this.
ROUNDING_BYTES = 512
# Tokens from which on masks and scores of all pairs matter: of 8,192 a head has 128 MiB of scores in bf16.
LONG = 8192
# Operations that neither read nor write an element, and `fill_`, by which the stream checker poisons freed slots.
FREE = tuple(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "set_", "fill_")
)
# Operations that read as many elements as they return.
GATHERS = tuple(getattr(torch.ops.aten, name) for name in ("embedding", "gather", "index", "index_select"))


class MemoryTracker:
    """Counts bytes of the storages that operations made and that are alive, their peak, and the FLOPs of operations.

    Counts operations on meta tensors inside `recording`, in any thread. Storages that were there before, such as
    parameters, are left out. FLOPs are those of products and convolutions, `flops_of` those of `KINDS` of them.
    `gradient_bytes` of the live bytes are gradients that stay on the device (`gradient_landed`),
    `peak_gradient_bytes` were when the peak was reached. `square_bytes` were alive at most in a step of masks and
    scores of all pairs of tokens, `LONG` of them or more.
    `memory_bytes` are those that other operations read and wrote, whose time is that of memory.
    `spend(flops, copied_bytes, memory_bytes, kind)` is called for each operation.
    """

    def __init__(self, spend: Callable[..., None] = lambda flops, copied_bytes, memory_bytes, kind=None: None):
        self.live_bytes = 0
        self.peak_bytes = 0
        self.gradient_bytes = 0
        self.peak_gradient_bytes = 0
        self.flops = 0.0
        self.flops_of = dict.fromkeys(KINDS, 0.0)
        self.memory_bytes = 0
        self.square_bytes = 0
        self._live_square_bytes = 0
        self.spend = spend
        self._landed: set[Tensor] = set()
        self._storages: dict[int, weakref.ref] = {}
        self._thread = threading.local()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Counts the operations of the calling thread inside the block. Does nothing where it is nested in itself."""
        if getattr(self._thread, "records", False):
            yield
            return
        self._thread.records = True
        try:
            with _Recording(self):
                yield
        finally:
            self._thread.records = False

    def add_flops(self, count: float, kind: str | None = None) -> None:
        """Counts the FLOPs of an operation that the tracker cannot see by itself; `kind`: one of `KINDS`."""
        count *= counted.times
        self.flops += count
        if kind is not None:
            self.flops_of[kind] += count
        self.spend(count, 0, 0, kind)

    def start_step(self) -> None:
        """Starts a step: no gradient is there yet, and the peak is the bytes alive now."""
        self.peak_bytes = self.live_bytes
        self.gradient_bytes = self.peak_gradient_bytes = 0
        self.square_bytes = self._live_square_bytes
        self._landed.clear()

    def gradient_landed(self, parameter: Tensor) -> None:
        """Counts the gradient of `parameter`, which stays on the device; a hook of autograd."""
        if parameter not in self._landed:
            self._landed.add(parameter)
            self.gradient_bytes += parameter.grad.nbytes

    def add(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor, once, for as long as it lives."""
        storage = tensor.untyped_storage()
        key = storage_address(storage)
        if key in self._storages:
            return
        nbytes = -(-storage.nbytes() // ROUNDING_BYTES) * ROUNDING_BYTES
        of_squares = nbytes if _is_square(tensor.shape) else 0

        def gone(_: object) -> None:
            del self._storages[key]
            self.live_bytes -= nbytes
            self._live_square_bytes -= of_squares

        self._storages[key] = weakref.ref(storage, gone)
        self.live_bytes += nbytes
        self._live_square_bytes += of_squares
        self.square_bytes = max(self.square_bytes, self._live_square_bytes)
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_gradient_bytes = self.live_bytes, self.gradient_bytes


class _Recording(UncompiledMode):
    def __init__(self, tracker: MemoryTracker):
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any_wraps(types):
            # The operations on what it wraps come here one by one.
            return NotImplemented
        kwargs, tracker = kwargs or {}, self._tracker
        result, made, known = known_or_computed(function, args, kwargs)
        for tensor in made:
            tracker.add(tensor)
        times = counted.times
        if known.copied_bytes is not None:
            tracker.spend(0.0, times * known.copied_bytes, 0)
        elif known.flops is not None:
            tracker.add_flops(known.flops)
        elif known.memory_bytes:
            tracker.memory_bytes += times * known.memory_bytes
            tracker.spend(0.0, 0, times * known.memory_bytes)
        return result


def _is_square(shape: torch.Size) -> bool:
    """Tells a mask or scores, [..., rows, heads, tokens, tokens], by four dimensions: gradients of weights have fewer.

    Scores may have a column more, for a sink.
    """
    return len(shape) > 3 and shape[-2] >= LONG and 0 <= shape[-1] - shape[-2] <= 1


def _bytes_moved(function: Callable, given: Sequence[Tensor], result: Any, made: Sequence[Tensor]) -> int:
    """Returns the bytes that an operation other than a product reads and writes: none where it makes a view."""
    written = made or [tensor for tensor in given if tensor is result]
    if not written or overload_packet(function) in FREE:
        return 0
    nbytes = sum(tensor.nbytes for tensor in written)
    most = nbytes if overload_packet(function) in GATHERS else math.inf
    return nbytes + sum(min(_bytes_read(tensor), most) for tensor in given)


def _bytes_read(tensor: Tensor) -> int:
    """Returns the bytes of the elements of `tensor` in memory: of one that was expanded, those of the original."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return tensor.itemsize * math.prod(sizes)
