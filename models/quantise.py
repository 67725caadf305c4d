"""Frozen weights that are held in eight or four bits, and products with them.

A quantised weight is a tensor subclass: it has the shape and dtype of what it stands for, and wraps the tensors that
its format needs (`models.quantise_formats`). So a layer stays an `nn.Linear`, and whoever holds parameters holds fewer
bytes. A product saves the quantised tensors for backward, not the weight that it computes from them: where they go
meanwhile is the business of the mode (QLoRA, Dettmers et al. 2023, computes the same so).

Values are quantised on the CPU, wherever the weight is: the same bits in every mode and on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.quantise_formats import Format

aten = torch.ops.aten
# The ids of weights that code which fills a model is to leave alone.
_settled: set[int] = set()


class QuantisedWeight(torch.Tensor):
    """A matrix in a format: `format.dequantise` of the tensors that it wraps, in its dtype.

    Writing into it (`copy_`, `fill_`) quantises. All other operations but products take the matrix that it stands for.
    """

    @staticmethod
    def __new__(cls, format: Format, inner: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype):
        device = next(iter(inner.values())).device
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __init__(self, format: Format, inner: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype):
        self.format = format
        self.inner_names = tuple(inner)
        for name, tensor in inner.items():
            setattr(self, name, tensor)

    @classmethod
    def empty(cls, format: Format, like: Tensor) -> QuantisedWeight:
        """Returns a weight without values, of the shape, dtype and device of `like`."""
        return cls(format, format.empty(like.shape, like.device), like.shape, like.dtype)

    @property
    def inner(self) -> dict[str, Tensor]:
        """The tensors that it wraps, by name."""
        return {name: getattr(self, name) for name in self.inner_names}

    @property
    def nbytes(self) -> int:
        """The bytes that it has, not those of what it stands for."""
        return sum(tensor.nbytes for tensor in self.inner.values())

    def dequantised(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the matrix that it stands for."""
        return self.format.dequantise(self.inner, self.shape, dtype or self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Format, torch.dtype]]:
        return list(self.inner_names), (self.format, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride) -> QuantisedWeight:
        return cls(context[0], inner, size, context[1])

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"QuantisedWeight({self.format}, {tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        if function is F.linear:
            return _linear(*arguments, **keywords)
        # The default would make a weight without tensors of each result.
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **keywords)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        own = arguments[0]
        if function in (aten.detach.default, aten.clone.default, aten.alias.default):
            return own._with({name: function(tensor) for name, tensor in own.inner.items()}, own.dtype)
        if function is aten._to_copy.default:
            dtype, device = keywords.get("dtype") or own.dtype, keywords.get("device")
            keywords = {"device": device, "non_blocking": keywords.get("non_blocking", False)}
            return own._with({name: aten._to_copy(tensor, **keywords) for name, tensor in own.inner.items()}, dtype)
        if function is aten.empty_like.default:
            return torch.empty(
                own.shape, dtype=keywords.get("dtype") or own.dtype, device=keywords.get("device") or own.device
            )
        if function is aten.copy_.default and isinstance(own, cls):
            own._write(arguments[1])
            return own
        if function is aten.fill_.Scalar:
            own._write(torch.full(own.shape, arguments[1], dtype=own.dtype, device="cpu"))
            return own
        written = (own, *keywords.values())
        if function._schema.is_mutable and any(isinstance(each, cls) for each in written):
            raise RuntimeError(f"{function} would write into a weight quantised as {_first(cls, written).format.name}")
        plain = [_plain(each) for each in arguments]
        return function(*plain, **{name: _plain(each) for name, each in keywords.items()})

    def _with(self, inner: Mapping[str, Tensor], dtype: torch.dtype) -> QuantisedWeight:
        return QuantisedWeight(self.format, inner, self.shape, dtype)

    def _write(self, source: Tensor) -> None:
        if isinstance(source, QuantisedWeight) and source.format == self.format:
            inner = source.inner
        else:
            # As a float matrix of the dtype that the layer has without the format.
            inner = self.format.quantise(_plain(source).to("cpu", self.dtype).expand(self.shape))
        for name, tensor in self.inner.items():
            tensor.copy_(inner[name])


class _Product(torch.autograd.Function):
    """`rows @ weight.t() + bias` with a quantised weight, which is made of its parts again in backward."""

    @staticmethod
    def forward(ctx, rows: Tensor, bias: Tensor | None, format: Format, shape: torch.Size, names, *inner: Tensor):
        ctx.save_for_backward(*inner)
        ctx.format, ctx.shape, ctx.names = format, shape, names
        return F.linear(rows, format.dequantise(dict(zip(names, inner, strict=True)), shape, rows.dtype), bias)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        rows_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            inner = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
            rows_gradient = gradient @ ctx.format.dequantise(inner, ctx.shape, gradient.dtype)
        if ctx.needs_input_grad[1]:
            bias_gradient = gradient.flatten(0, -2).sum(0)
        return rows_gradient, bias_gradient, None, None, None, *[None for _ in ctx.names]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, QuantisedWeight):
        return F.linear(_plain(input), weight, _plain(bias))
    inner = weight.inner
    return _Product.apply(input, bias, weight.format, weight.shape, tuple(inner), *inner.values())


def _plain(value: object) -> object:
    if isinstance(value, QuantisedWeight):
        return value.dequantised()
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(each) for each in value)
    return value


def _first(kind: type, arguments: Iterable[object]) -> QuantisedWeight:
    return next(each for each in arguments if isinstance(each, kind))


def quantise(model: nn.Module, names: Iterable[str], format: Format) -> None:
    """Gives the Linear layers `names` weights without values in `format`, frozen, on the device where they were.

    A weight that several of the layers share stays shared.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name in names:
        layer = model.get_submodule(name)
        weight = layer.weight
        if weight not in made:
            made[weight] = nn.Parameter(QuantisedWeight.empty(format, weight), requires_grad=False)
        layer.weight = made[weight]


def quantisable(model: nn.Module, blocks: Iterable[str], include: Iterable[str], exclude: Iterable[str]) -> list[str]:
    """Returns the names of the Linear layers in `blocks` that match a pattern of `include`, and none of `exclude`.

    No `include` means all. A layer whose weight is used outside of these layers too, as a tied one, is left out.
    """
    include, exclude = list(include), list(exclude)
    blocks = [f"{block}." for block in blocks]
    chosen = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and any(f"{name}.".startswith(block) for block in blocks)
        and (not include or any(fnmatchcase(name, pattern) for pattern in include))
        and not any(fnmatchcase(name, pattern) for pattern in exclude)
    ]
    inside = {model.get_submodule(name) for name in chosen}
    outside = {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if module not in inside or name != "weight"
    }
    return [name for name in chosen if model.get_submodule(name).weight not in outside]


def is_quantised(model: nn.Module) -> bool:
    """Tells whether `model` has quantised weights."""
    return any(isinstance(parameter, QuantisedWeight) for parameter in model.parameters())


@contextmanager
def values_of(tensor: Tensor) -> Iterator[Tensor]:
    """Gives memory to write the values of a parameter or buffer into: its own, detached.

    Of a quantised weight, it is memory on the CPU for this one weight, which is quantised at the end of the block.
    Where the weight has its values (`settled`), it is a tensor without memory, and nothing is read or computed.
    """
    if not isinstance(tensor, QuantisedWeight):
        yield tensor.detach()
        return
    if id(tensor) in _settled:
        yield torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    yield memory
    with torch.no_grad():
        tensor.detach().copy_(memory)


@contextmanager
def settled(weights: Iterable[QuantisedWeight]) -> Iterator[None]:
    """Inside the block, code that fills a model leaves these weights as they are."""
    ids = {id(weight) for weight in weights}
    _settled.update(ids)
    try:
        yield
    finally:
        _settled.difference_update(ids)


def stored_tensors(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Returns the plain tensors that a file of the model has for `tensor`, called `name` there."""
    if not isinstance(tensor, QuantisedWeight):
        return {name: tensor.detach()}
    return {f"{name}.{part}": inner.detach() for part, inner in tensor.inner.items()}
