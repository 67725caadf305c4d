"""What hooks on saved tensors have in common: what stays where it is, what is passed on, and autograd's own check.

Autograd knows one pair of hooks at a time, the innermost. A pair that lets others have their share keeps the pair
outside it as an attribute of its pack function: `owner` (whose hooks they are), `outer` (the pair outside, or None)
and, where some tensors are its own whatever stands above it, `claims` (a function of a tensor).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Hooks = tuple[Callable, Callable]


class Kept(NamedTuple):
    """A saved tensor that stays where it is, with the version that autograd would check."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kept:
        # Detached it shares memory and version. As it is, an operation's result would keep the operation that saves
        # it, and neither would ever go.
        return cls(tensor.detach(), tensor._version)

    def checked(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError if it was modified since it was saved."""
        check_version(self.tensor._version, self.version, self.tensor.dtype, self.tensor.shape)
        return self.tensor


class Passed(NamedTuple):
    """What other hooks made of a tensor, and their way back."""

    packed: object
    unpack: Callable

    @classmethod
    def to(cls, hooks: Hooks, tensor: torch.Tensor) -> Passed:
        return cls(hooks[0](tensor), hooks[1])


def check_version(now: int, saved: int, dtype: torch.dtype, shape: torch.Size) -> None:
    """Raises RuntimeError, as autograd does without hooks, where a saved tensor is no longer at its version."""
    if now != saved:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" a {dtype} tensor of shape {tuple(shape)} is at version {now}, saved at version {saved}"
        )


def active_hooks() -> Hooks | None:
    """The innermost hooks of this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def beneath_claims(hooks: Hooks | None) -> Hooks | None:
    """The innermost of `hooks` and those outside them that do not merely claim what is theirs."""
    while hooks is not None and hasattr(hooks[0], "claims"):
        hooks = hooks[0].outer
    return hooks


def claimed(hooks: Hooks | None, tensor: torch.Tensor) -> bool:
    """Whether `hooks`, or claiming hooks outside them, claim `tensor`."""
    while hooks is not None and hasattr(hooks[0], "claims"):
        if hooks[0].claims(tensor):
            return True
        hooks = hooks[0].outer
    return False
