"""Frozen weights that are held in eight or four bits, and products with them.

A quantised weight is a tensor subclass: it has the shape and dtype of what it stands for, and wraps the tensors that
its format needs (`models.quantise_formats`). So a layer stays an `nn.Linear`, and its parameter takes fewer bytes. A
product saves the quantised tensors for backward, not the weight that it computes from them, as QLoRA does (Dettmers et
al. 2023); the mode decides where they are meanwhile. For `F.linear` there is a product of our own. Other products
(`addmm`, `grouped_mm`) save their argument, which is the quantised weight: also where it is transposed, or one expert's
matrix, since these are quantised weights too.

Values are quantised where they are made: the same bits on each device, in every mode, with every number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.quantise_formats import GPU_WORK_BYTES, Format

aten = torch.ops.aten
# The ids of weights that code which fills a model is to leave alone.
_settled: set[int] = set()
# Of each `kept_memory`, the device, and the memory that the next weight may use.
_spare: list[tuple[torch.device, list[Tensor]]] = []


class QuantisedWeight(torch.Tensor):
    """A matrix, or one for each expert, in a format: `format.dequantise` of the tensors that it wraps, in its dtype.

    Writing into it (`copy_`, `fill_`) quantises. All other operations but products take the matrix that it stands for.

    Attributes:
        turned: it is a transposed view: the tensors are those of the matrix with its last two dimensions exchanged.
    """

    @staticmethod
    def __new__(
        cls,
        format: Format,
        inner: Mapping[str, Tensor],
        shape: torch.Size,
        dtype: torch.dtype,
        turned: bool = False,
    ) -> QuantisedWeight:
        device = next(iter(inner.values())).device
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.format = format
        self.turned = turned
        # `dtype` and `shape` go through `__torch_function__`, and a step asks for them thousands of times.
        self._dtype = dtype
        self._stored_shape = _exchanged(shape) if turned else shape
        self.inner_names = tuple(inner)
        for name, tensor in inner.items():
            setattr(self, name, tensor)
        return self

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
        matrix = self.format.dequantise(self.inner, self._stored_shape, dtype or self._dtype)
        return matrix.transpose(-2, -1) if self.turned else matrix

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Format, torch.dtype, bool]]:
        return list(self.inner_names), (self.format, self._dtype, self.turned)

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride) -> QuantisedWeight:
        format, dtype, turned = context
        return cls(format, inner, size, dtype, turned)

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
        if _exchanges_last_two(function, arguments):
            return QuantisedWeight(own.format, own.inner, _exchanged(own.shape), own.dtype, not own.turned)
        if function is aten.select.int and own.ndim == 3 and arguments[1] == 0:
            index = range(own.shape[0])[arguments[2]]
            inner = own.format.part(own.inner, own._stored_shape, index)
            if inner is not None:
                return QuantisedWeight(own.format, inner, own.shape[1:], own.dtype, own.turned)
        if function is aten.empty_like.default:
            return torch.empty(
                own.shape, dtype=keywords.get("dtype") or own.dtype, device=keywords.get("device") or own.device
            )
        if function is aten.copy_.default and isinstance(own, cls) and not own.turned:
            own._write(arguments[1])
            return own
        if function is aten.fill_.Scalar and not own.turned:
            own._write(torch.full(own.shape, arguments[1], dtype=own.dtype, device="cpu"))
            return own
        quantised = [each for each in (own, *keywords.values()) if isinstance(each, cls)]
        if function._schema.is_mutable and quantised:
            raise RuntimeError(f"{function} would write into a weight quantised as {quantised[0].format.name}")
        plain = [_plain(each) for each in arguments]
        return function(*plain, **{name: _plain(each) for name, each in keywords.items()})

    def _with(self, inner: Mapping[str, Tensor], dtype: torch.dtype) -> QuantisedWeight:
        return QuantisedWeight(self.format, inner, self.shape, dtype, self.turned)

    def _write(self, source: Tensor) -> None:
        same = isinstance(source, QuantisedWeight) and source.format == self.format and source.shape == self.shape
        if same and not source.turned:
            for name, tensor in self.inner.items():
                tensor.copy_(source.inner[name])
            return
        # The format quantises a float matrix of the dtype that the layer has without the format.
        self.format.write(_plain(source).to(self.dtype).expand(self.shape), self.inner)


class _Product(torch.autograd.Function):
    """`rows @ weight.t() + bias` with a quantised weight, which is made of its parts again in backward."""

    @staticmethod
    def forward(ctx, rows: Tensor, bias: Tensor | None, weight: QuantisedWeight):
        ctx.save_for_backward(weight)
        return F.linear(rows, weight.dequantised(rows.dtype), bias)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        rows_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            (weight,) = ctx.saved_tensors
            # Hooks on saved tensors, as torch's save_on_cpu, may give back the matrix.
            is_quantised = isinstance(weight, QuantisedWeight)
            matrix = weight.dequantised(gradient.dtype) if is_quantised else weight.to(gradient.dtype)
            rows_gradient = gradient @ matrix
        if ctx.needs_input_grad[1]:
            bias_gradient = gradient.flatten(0, -2).sum(0)
        return rows_gradient, bias_gradient, None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, QuantisedWeight) or weight.turned:
        return F.linear(_plain(input), _plain(weight), _plain(bias))
    return _Product.apply(input, bias, weight)


def _exchanged(shape: torch.Size) -> torch.Size:
    return torch.Size((*shape[:-2], shape[-1], shape[-2]))


def _exchanges_last_two(function: torch._ops.OpOverload, arguments: Sequence[object]) -> bool:
    if function is aten.t.default:
        return True
    count = arguments[0].ndim
    return function is aten.transpose.int and {axis % count for axis in arguments[1:]} == {count - 2, count - 1}


def _plain(value: object) -> object:
    if isinstance(value, QuantisedWeight):
        return value.dequantised()
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(each) for each in value)
    return value


def quantise(model: nn.Module, names: Iterable[str], format: Format) -> None:
    """Makes the parameters `names` quantised ones without values in `format`, frozen, on the device where they were.

    A parameter that several modules share stays shared.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name in names:
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        weight = getattr(module, own)
        if weight not in made:
            made[weight] = nn.Parameter(QuantisedWeight.empty(format, weight), requires_grad=False)
        setattr(module, own, made[weight])


def quantisable(model: nn.Module, blocks: Iterable[str], include: Iterable[str], exclude: Iterable[str]) -> list[str]:
    """Returns the names of the parameters in `blocks` that match a pattern of `include`, and none of `exclude`.

    They are the weights of linear layers, transformers' Conv1D among them, and those of all experts in one tensor. The
    patterns are for the names of layers: that of a weight without ".weight". No `include` means all. A parameter that
    is used elsewhere too, as a tied one, is left out.
    """
    include, exclude = list(include), list(exclude)
    blocks = [f"{block}." for block in blocks]

    def is_chosen(name: str) -> bool:
        layer = name.removesuffix(".weight")
        return (
            any(f"{layer}.".startswith(block) for block in blocks)
            and (not include or any(fnmatchcase(layer, pattern) for pattern in include))
            and not any(fnmatchcase(layer, pattern) for pattern in exclude)
        )

    named = [
        (f"{path}.{own}" if path else own, parameter, _is_multiplied(module, own, parameter))
        for path, module in model.named_modules()
        for own, parameter in module.named_parameters(recurse=False)
    ]
    chosen = {name: parameter for name, parameter, multiplied in named if multiplied and is_chosen(name)}
    outside = {parameter for name, parameter, _ in named if name not in chosen}
    return [name for name, parameter in chosen.items() if parameter not in outside]


def _is_multiplied(module: nn.Module, own: str, parameter: nn.Parameter) -> bool:
    """Tells whether it is a matrix that products take, or those of experts, and nothing else reads."""
    if own == "weight":
        return isinstance(module, nn.Linear) or is_conv1d(module)
    # Attributes that transformers' decorator for classes of experts leaves in their objects.
    return parameter.ndim == 3 and hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def is_conv1d(module: nn.Module) -> bool:
    """Tells whether it is the Conv1D of transformers, a linear layer whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_quantised(model: nn.Module) -> bool:
    """Tells whether `model` has quantised weights."""
    return any(isinstance(parameter, QuantisedWeight) for parameter in model.parameters())


@contextmanager
def values_of(tensor: Tensor) -> Iterator[Tensor]:
    """Gives memory to write the values of a parameter or buffer into: its own, detached.

    For a quantised weight, it is memory for this one weight, on the CPU or where `kept_memory` has it. The weight is
    quantised at the end of the block. Where the tensor has its values (`settled`), it is a tensor without memory, and
    nothing is read or computed.
    """
    if is_settled(tensor):
        yield torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return
    if not isinstance(tensor, QuantisedWeight):
        yield tensor.detach()
        return
    device, spare = _spare[-1] if _spare else (torch.device("cpu"), [])
    nbytes = tensor.numel() * tensor.dtype.itemsize
    memory = spare.pop() if spare else None
    if memory is None or len(memory) < nbytes:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    values = memory[:nbytes].view(tensor.dtype).view(tensor.shape)
    yield values
    with torch.no_grad():
        tensor.detach().copy_(values)
    spare.append(memory)


@contextmanager
def kept_memory(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Makes `values_of` use the same memory for one quantised weight of `model` after the other inside the block.

    The system would map memory of its own for each page by page. The memory is on `device`, since a GPU quantises much
    faster than a host, or on the CPU if the GPU has too little for the largest weight.
    """
    weights = (weight for weight in model.parameters() if isinstance(weight, QuantisedWeight))
    largest = max((weight.numel() * weight.dtype.itemsize for weight in weights), default=0)
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < largest + GPU_WORK_BYTES:
        device = torch.device("cpu")
    _spare.append((device, []))
    try:
        yield
    finally:
        _spare.pop()


@contextmanager
def settled(weights: Iterable[Tensor]) -> Iterator[None]:
    """Makes code that fills a model leave these parameters as they are inside the block."""
    ids = {id(weight) for weight in weights}
    _settled.update(ids)
    try:
        yield
    finally:
        _settled.difference_update(ids)


def is_settled(tensor: Tensor) -> bool:
    """Tells whether code that fills a model is to leave `tensor` as it is."""
    return id(tensor) in _settled


def stored_tensors(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Returns the plain tensors that a file of the model has for `tensor`, called `name` there."""
    if not isinstance(tensor, QuantisedWeight):
        return {name: tensor.detach()}
    return {f"{name}.{part}": inner.detach() for part, inner in tensor.inner.items()}
