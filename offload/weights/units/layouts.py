"""Lays a tensor into a flat buffer: its plain tensors one after the other, each at an aligned offset.

Most tensors are one plain tensor. One that consists of several (`torch_private.tensor_parts`), such as a quantised
weight with its scales, is made anew over views of the buffer, wherever the buffer is: its bytes move as they are, and
nobody computes what it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offload.errors import refuse_part
from offload.memory.host_memory import aligned
from offload.torch_private.tensor_parts import dressed, is_compound, parts, wrapped, wraps


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

    One that wraps others is a parameter again where `like` is one, with its attributes. A quantisation state is not
    part of the data.
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
