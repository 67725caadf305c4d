"""GradientSlot: host memory for the gradient of a unit's tensor, and what has landed there."""

from __future__ import annotations

import torch
from torch import nn

from offload.memory.host_memory import HostArena
from offload.streams.registry import Event
from offload.torch_private.torch_internals import gradient_hooks
from offload.weights.units.layouts import Piece


class GradientSlot:
    """Memory at home for one gradient, which lies in it as `piece` says; `name` is that of the parameter.

    `memory` is None for a parameter that is frozen, or whose gradients go somewhere else. `landed_in` is the memory
    that the last gradient was copied into, `memory` or the parameter's earlier gradient; `landed` ends that copy, and
    `_version` is autograd's version counter after it. `norm` is the L2 norm of this step's gradient (a float32 scalar
    on the device) where norms are wanted. `is_released`: this step's gradient went to its update, and is in no `.grad`.
    `meets_host_gradient`: a loss has used the parameter on the host besides its stand-in.
    """

    def __init__(self, name: str, piece: Piece):
        self._name, self._piece = name, piece
        self.memory: torch.Tensor | None = None
        self.landed_in: torch.Tensor | None = None
        self.landed: Event | None = None
        self.norm: torch.Tensor | None = None
        self.is_released = False
        self.meets_host_gradient = False
        self._version = 0

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns a gradient over `memory`, uint8, of the parameter's shape, strides and dtype."""
        # `.data` has a version counter of its own, which shows whether this gradient was changed.
        return self._piece.over(memory).data

    def lie_in(self, memory: torch.Tensor) -> None:
        """Gives the gradient host memory: uint8 with a storage of its own, so that its users can be counted."""
        self.memory = self.over(memory)

    def make_memory(self, arena: HostArena) -> None:
        """Gives the gradient a block of its own."""
        self.lie_in(arena.allocate(self._piece.nbytes, f"gradient of {self._name}").bytes)

    def begin_step(self) -> None:
        """Forgets what the last step has noted."""
        self.norm, self.is_released = None, False

    def lands(self, host: nn.Parameter, target: torch.Tensor, done: Event) -> None:
        """Notes that the gradient of `host` is in `target` once `done` is past, and makes it the one of `.grad`."""
        self.landed, self.landed_in, self._version = done, target, target._version
        host.grad = target

    def is_as_landed(self, host: nn.Parameter) -> bool:
        """Tells whether the gradient of `host` is the one that landed: not replaced, dropped or changed since."""
        landed_in = self.landed_in
        return landed_in is not None and host.grad is landed_in and landed_in._version == self._version

    def leaves_to_autograd(self, host: nn.Parameter, gradient: torch.Tensor) -> bool:
        """Tells whether autograd gets this gradient of `host` in host memory, and accumulates it there itself.

        Hooks run on the host, where they were registered, and autograd accumulates what they return. Where a loss uses
        the weight on the host, autograd adds that gradient first, and then the sum to the earlier. It also joins sparse
        gradients, whose bytes are not known before, converts gradients of other dtypes, and keeps the graph of those
        of `create_graph`.
        """
        earlier = host.grad
        return bool(
            any(gradient_hooks(host))
            or (self.meets_host_gradient and earlier is not None)
            or gradient.requires_grad
            or gradient.layout is not torch.strided
            or (earlier is not None and (earlier.layout is not torch.strided or earlier.dtype is not gradient.dtype))
        )

    def __str__(self) -> str:
        return f"host gradient of {self._name}"
