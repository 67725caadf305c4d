"""Gives parameters and buffers other memory: at home (`move_into`), or on the device where they stay.

A `Layout` lays a tensor into a flat buffer: its plain tensors one after the other, each at an aligned offset. Most
tensors are one plain tensor. One that consists of several (`torch_private.tensor_parts`), such as a quantised weight
with its scales, is made anew over views of the buffer, wherever the buffer is: its bytes move as they are, and nobody
computes what it stands for.

A tensor of the meta device has no values. The memory that a mode makes for it begins and ends with bytes that no value
of a model has. Whoever fills the tensor overwrites them, by whatever means: an initialisation, a state dict, `.data`,
NumPy, or another tensor in its place. Version counters would miss some of these (`UnfilledTensors`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from offload.knobs import refuse_part
from offload.memory.host_memory import aligned
from offload.torch_private.module_contexts import before_each_call
from offload.torch_private.tensor_parts import dressed, give_state, is_compound, parts, wrapped, wraps
from offload.torch_private.torch_internals import is_function_transform_tensor, refresh_flat_weights

# NaN in every floating-point dtype of two bytes or more (in those of two, every second element), and no value of bool.
# It is written as often as it fits into the first and the last END_BYTES.
MARK = (0xD7, 0xA5, 0xFF, 0x7F)
END_BYTES = 16
# Names in an error.
NAMED = 3


def mark(memory: torch.Tensor) -> None:
    """Writes the mark into `memory`, a new dense tensor without values."""
    for end in _ends(memory):
        end.copy_(torch.tensor(_marks(end), dtype=torch.uint8, device="cpu"))


def is_marked(tensor: torch.Tensor) -> bool:
    """Tells whether `tensor`, or one that it wraps, begins and ends with the mark.

    It does not where it is empty, or on the meta device.
    """
    if wraps(tensor):
        return any(map(is_marked, parts(tensor)))
    ends = _ends(tensor)
    return bool(ends) and all(end.tolist() == _marks(end) for end in ends)


def unfilled(model: nn.Module, but: Collection[torch.Tensor] = ()) -> list[str]:
    """Returns the names of the parameters and buffers of `model` that have no values, tied ones once; none of `but`."""
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in named if tensor not in but and is_marked(tensor)]


class UnfilledTensors:
    """Refuses steps and forwards of an attached model while a tensor of it has no values.

    After the first success, or where nothing was made from meta tensors, it is out of the way.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._fixed: Collection[torch.Tensor] = ()
        self._remove_hooks: Callable[[], None] = lambda: None

    def watch(self, model: nn.Module, fixed: Collection[torch.Tensor] = ()) -> None:
        """Begins to refuse, where something has no values. Call it when the tensors are where they belong.

        `fixed` have their values for good, and are not looked at.
        """
        if unfilled(model, fixed):
            self._model, self._fixed = model, fixed
            self._remove_hooks = before_each_call(model.modules(), self._check_call)

    def check_step(self) -> None:
        """Raises RuntimeError in one line, with names, if a tensor has no values."""
        self._check()
        self.close()

    def close(self) -> None:
        """Ends the watch."""
        self._remove_hooks()
        self._model = None

    def _check_call(self) -> None:
        self._check()
        # A step checks once more: this call may have had tensors of its caller's (`torch.func.functional_call`).
        self._remove_hooks()

    def _check(self) -> None:
        names = unfilled(self._model, self._fixed) if self._model is not None else []
        if names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            raise RuntimeError(
                f"without values: {', '.join(names[:NAMED])}{more}. The model was built on the meta device: after the"
                " mode is attached, load them or call the model's own initialisation (load_state_dict leaves out"
                " buffers that are not persistent), or build the model on the CPU"
            )


def _ends(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the first and the last bytes of a tensor as views, uint8; nothing for tensors that were never marked."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or is_function_transform_tensor(tensor):
        return []
    if tensor.is_meta or tensor.layout is not torch.strided:
        return []
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return []
    end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    if not tensor.nbytes or end > tensor.untyped_storage().nbytes():
        return []
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return [flat] if flat.numel() <= 2 * END_BYTES else [flat[:END_BYTES], flat[-END_BYTES:]]


def _marks(end: torch.Tensor) -> list[int]:
    return [MARK[index % len(MARK)] for index in range(end.numel())]


@dataclass(frozen=True)
class Piece:
    """A plain tensor in a flat buffer, `offset` bytes behind the start of the tensor that it is a part of."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        return self.strides == _contiguous_strides(self.shape)

    def over(self, memory: Tensor) -> Tensor:
        """Returns this shape, dtype and strides over `memory`: uint8, contiguous, of as many bytes."""
        return memory.view(self.dtype).as_strided(self.shape, self.strides)


class Layout:
    """The pieces of a tensor, in the order of its parts."""

    def __init__(self, tensor: Tensor):
        self.is_compound = is_compound(tensor)
        self.pieces: list[Piece] = []
        self._kind = type(tensor)
        end = 0
        for part in parts(tensor):
            strides = part.stride() if _is_dense(part) else _contiguous_strides(part.shape)
            self.pieces.append(Piece(aligned(end), part.shape, part.dtype, strides))
            end = aligned(end) + self.pieces[-1].nbytes
        self.nbytes = end

    def views(self, memory: Callable[[int, int], Tensor]) -> list[Tensor]:
        """Returns a view for each piece; `memory(offset, nbytes)` returns bytes of the buffer, uint8.

        Offsets count from the start of the tensor.
        """
        return [piece.over(memory(piece.offset, piece.nbytes)) for piece in self.pieces]

    def fits(self, tensor: Tensor) -> bool:
        """Tells whether `tensor` has parts of the same shapes and dtypes, and is of the same class if it wraps them."""
        alike = [(piece.shape, piece.dtype) for piece in self.pieces]
        return (type(tensor) is self._kind or not wraps(tensor)) and alike == [
            (p.shape, p.dtype) for p in parts(tensor)
        ]


def over(like: Tensor, memory: list[Tensor]) -> Tensor:
    """Returns `memory`, which has a tensor for each part of `like`, as the data of a tensor like it.

    One that wraps others is a parameter again where `like` is one. A quantisation state is not part of the data.
    """
    return dressed(wrapped(like, memory), like) if wraps(like) else memory[0]


def check_frozen(name: str, tensor: Tensor) -> None:
    """Raises ValueError in one line for a DTensor, and for a parameter that trains and wraps other tensors."""
    refuse_part(name, tensor)
    if tensor.requires_grad and isinstance(tensor, nn.Parameter) and wraps(tensor):
        raise ValueError(
            f"{name} is a {type(tensor).__name__} that trains: a parameter that wraps other tensors streams only"
            " where it is frozen: set requires_grad=False, or leave its module out of the mode with `exclude`"
        )


def check_buffer(name: str, tensor: Tensor) -> None:
    """Raises ValueError in one line for a buffer that requires a gradient, as a parameter does."""
    if tensor.requires_grad and tensor.is_leaf and not isinstance(tensor, nn.Parameter):
        raise ValueError(
            f"{name} is a buffer that requires a gradient, and what streams computes with copies of buffers: make it a"
            " parameter, or leave its module out of the mode with `exclude`"
        )


def _is_dense(tensor: Tensor) -> bool:
    """Tells whether the elements of a tensor fill its memory without holes and overlaps, in whichever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


@dataclass(frozen=True)
class ModuleAttribute:
    """The attribute of a module that holds a parameter or buffer."""

    module: nn.Module
    name: str
    is_buffer: bool

    @cached_property
    def is_recurrent(self) -> bool:
        """True if the module is a recurrent layer, which keeps a second list of its tensors."""
        return isinstance(self.module, nn.RNNBase)

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """The dictionary of the module that has the tensor by its name."""
        return self.module._buffers if self.is_buffer else self.module._parameters

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor that the module holds; None where its user has set None or deleted the attribute."""
        tensors = self.module._buffers if self.is_buffer else self.module._parameters
        try:
            return tensors.get(self.name)
        except AttributeError:
            # Those of a scripted module have no `get`.
            return tensors[self.name] if self.name in tensors else None  # noqa: SIM401

    def assign(self, tensor: torch.Tensor | None) -> None:
        """Makes the module hold `tensor`."""
        (self.module._buffers if self.is_buffer else self.module._parameters)[self.name] = tensor
        if self.is_recurrent:
            refresh_flat_weights(self.module)


def move_into(memory: list[torch.Tensor], tensor: torch.Tensor, attributes: Iterable[ModuleAttribute]) -> torch.Tensor:
    """Makes `memory`, a tensor for each part, the data of a parameter or buffer, keeping its values.

    That of a meta tensor is marked, to show whether somebody has filled it. Returns the tensor that the modules hold
    afterwards: the same one, but for a meta tensor and one that wraps others.
    """
    if tensor.is_meta:
        # `.data` has a version counter of its own: in a dry run all tensors of a unit share their memory's.
        memory = [piece.data for piece in memory]
        for piece in memory:
            mark(piece)
        return put_over(memory, tensor, attributes)
    for piece, part in zip(memory, parts(tensor), strict=True):
        piece.copy_(part.data)
    return give_memory(tensor, memory, attributes)


def put_over(memory: list[torch.Tensor], tensor: torch.Tensor, attributes: Iterable[ModuleAttribute]) -> torch.Tensor:
    """Makes `memory`, which has the values already, the data of a parameter or buffer. Returns it, as `move_into`."""
    if not tensor.is_meta:
        return give_memory(tensor, memory, attributes)
    real = over(tensor, memory)
    if isinstance(tensor, nn.Parameter) and not wraps(tensor):
        real = nn.Parameter(real, tensor.requires_grad)
    return held_by(attributes, real)


def move_to(tensor: torch.Tensor, device: torch.device, attributes: Iterable[ModuleAttribute]) -> torch.Tensor:
    """Moves a parameter or buffer to `device`, with its values and its gradient. Returns it, as `move_into` does."""
    moved = give_memory(tensor, [part.data.to(device) for part in parts(tensor)], attributes)
    # Afterwards: torch refuses a gradient on another device than the parameter's data.
    if tensor.grad is not None:
        moved.grad = tensor.grad.to(device)
    return moved


def held_by(attributes: Iterable[ModuleAttribute], tensor: torch.Tensor) -> torch.Tensor:
    """Makes the attributes hold `tensor`, and returns it."""
    for attribute in attributes:
        attribute.assign(tensor)
    return tensor


def give_memory(
    tensor: torch.Tensor, memory: list[torch.Tensor], attributes: Iterable[ModuleAttribute]
) -> torch.Tensor:
    """Makes `memory`, a tensor for each part, the data of a tensor, and returns it.

    A tensor that wraps others has no data of its own: the attributes get a new one, which is returned.
    """
    if wraps(tensor):
        return held_by(attributes, over(tensor, memory))
    tensor.data = memory[0]
    if len(memory) > 1:
        give_state(tensor, memory[1:])
    return tensor


class DevicePlacement:
    """Puts parameters and buffers, given with the attributes that hold them, on `device`; `restore` puts them back.

    Meta tensors are replaced by memory to fill, which `restore` moves to the host. After an error all are as they were.
    """

    def __init__(self, tensors: Iterable[tuple[torch.Tensor, list[ModuleAttribute]]], device: torch.device):
        # What was found, where it was, what it is now, and the attributes that hold it.
        self._moved: list[tuple[torch.Tensor, torch.device, torch.Tensor, list[ModuleAttribute]]] = []
        try:
            for found, attributes in tensors:
                origin, tensor = found.device, found
                if origin != device:
                    memory = [torch.empty_like(part, device=device, requires_grad=False) for part in parts(found)]
                    tensor = move_into(memory, found, attributes)
                # A tensor with memory that was replaced would only keep that memory.
                self._moved.append((found if found.is_meta else tensor, origin, tensor, attributes))
        except BaseException:
            self.put_back()
            raise

    def put_back(self) -> None:
        """Gives every tensor back as it was found: meta tensors are in their modules again."""
        for found, origin, _, attributes in self._moved:
            if origin.type == "meta":
                held_by(attributes, found)
            elif found.device != origin:
                move_to(found, origin, attributes)

    @property
    def held(self) -> list[tuple[torch.Tensor, list[ModuleAttribute]]]:
        """The tensors as the modules hold them now, each with its attributes."""
        return [(tensor, attributes) for _, _, tensor, attributes in self._moved]

    def restore(self) -> None:
        """Moves every tensor back to the device where it was found, with its values and its gradient."""
        for _, origin, tensor, attributes in self._moved:
            # A module may have replaced a buffer, or have none any more.
            current = attributes[0].tensor if attributes[0].is_buffer else tensor
            if current is not None:
                has_no_origin = origin.type == "meta" and not current.is_meta
                target = torch.device("cpu") if has_no_origin else origin
                if current.device != target:
                    move_to(current, target, attributes)
