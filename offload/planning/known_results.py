"""What operations on meta tensors make and cost, kept by the shapes of their arguments.

torch computes many shapes in Python, which was half of the time of a plan. Blocks are alike: the operations of the
first are computed, and those of the others get new tensors of the same shapes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from offload.torch_private.torch_internals import OpOverload, overload_name, overload_packet, storage_address

# Arguments that are compared by their value.
PLAIN = frozenset({bool, int, float, str, torch.dtype, torch.layout, torch.device, torch.memory_format, type(None)})
# Frozen weights in few bits are held in tensors of these.
PACKED = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
# The result lies in memory of the arguments, or is not known: it is computed each time.
SHARES, UNKNOWN = "shares", "unknown"


class Operation(NamedTuple):
    """An operation on arguments of certain shapes: its FLOPs, None where no formula counts them, and what it returns.

    `copied_bytes` are those of a copy, None for another operation; `unpacks`: an argument holds numbers in few bits.
    `result` is new tensors (is it one, shapes, strides and dtypes), the argument of a number, `SHARES` or `UNKNOWN`.
    """

    flops: float | None
    copied_bytes: int | None
    unpacks: bool
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
    found = Operation(flops, copied_bytes, any(tensor.dtype in PACKED for tensor in given), recipe)
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
