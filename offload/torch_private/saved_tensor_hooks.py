"""Hooks on saved tensors that share one thread: who saves which tensor, and autograd's check for writes in place.

Autograd calls one pair of hooks (pack, unpack) at a time: the innermost. The pairs of this package still work inside
each other, because a pack function (`PackHook`) carries attributes that tell the pair inside it what to do:

- `owner`: the object whose hooks they are, by which the object finds out that its hooks are open already;
- `outer`: the pair outside of this one, or None;
- `claims`: a function of a tensor, True for the tensors that this pair saves whatever pair stands inside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from offload.torch_private.torch_internals import (
    compiles_frames,
    innermost_saved_tensor_hooks,
    is_checkpoint_pack,
    is_traced,
    left_out_of_graphs,
)

Hooks = tuple[Callable, Callable]


class PackHook:
    """A pack function with the attributes above. torch.compile leaves it out of its graphs."""

    def __init__(
        self,
        pack: Callable[[torch.Tensor], object],
        owner: object,
        outer: Hooks | None = None,
        claims: Callable[[torch.Tensor], bool] | None = None,
    ):
        self.pack = pack
        self.owner = owner
        if claims is not None:
            self.outer, self.claims = outer, claims

    def __call__(self, tensor: torch.Tensor) -> object:
        # What `left_out_of_graphs` does, without its call.
        if is_traced() or compiles_frames() is not None:
            return _packed(self, tensor)
        return self.pack(tensor)


@left_out_of_graphs
def _packed(hook: PackHook, tensor: torch.Tensor) -> object:
    return hook.pack(tensor)


class Kept(NamedTuple):
    """A saved tensor that stays where it is, with the version that autograd would check."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kept:
        # Detached, it shares memory and version with the original. The original may be the result of the operation
        # that saves it, and would keep that operation alive, which keeps what the hook returns: neither would ever go.
        return cls(tensor.detach(), tensor._version)

    def checked(self) -> torch.Tensor:
        """Returns the tensor. Raises RuntimeError if it was modified since it was saved."""
        tensor = self.tensor
        if tensor._version != self.version:
            check_version(tensor._version, self.version, tensor.dtype, tensor.shape)
        return tensor


class Passed(NamedTuple):
    """The result of other hooks' pack function, with their unpack function."""

    packed: object
    unpack: Callable

    @classmethod
    def to(cls, hooks: Hooks, tensor: torch.Tensor) -> Passed:
        return cls(hooks[0](tensor), hooks[1])


def check_version(current: int, saved: int, dtype: torch.dtype, shape: torch.Size) -> None:
    """Raises RuntimeError, as autograd does without hooks, if a tensor was modified since it was saved."""
    if current != saved:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" a {dtype} tensor of shape {tuple(shape)} is at version {current}, saved at version {saved}"
        )


def active_hooks() -> Hooks | None:
    """Returns the innermost hooks of this thread."""
    return innermost_saved_tensor_hooks(True)


def beneath_claims(hooks: Hooks | None) -> Hooks | None:
    """Returns the innermost pair, of `hooks` and those outside of it, that does not only save what it claims."""
    while hooks is not None and hasattr(hooks[0], "claims"):
        hooks = hooks[0].outer
    return hooks


def claimed(hooks: Hooks | None, tensor: torch.Tensor) -> bool:
    """Returns whether `hooks`, or claiming hooks outside of them, claim `tensor`."""
    while hooks is not None and hasattr(hooks[0], "claims"):
        if hooks[0].claims(tensor):
            return True
        hooks = hooks[0].outer
    return False


def leave_weights_uncounted() -> None:
    """Notes that the checkpoint whose hooks are innermost does without the weights that a mode saves.

    Its recompute then ends at the last other tensor, and does not begin where only weights were saved.
    """
    hooks = active_hooks()
    if hooks is not None:
        hooks[0].counts_no_weights = True


def counting_checkpoint(hooks: Hooks | None) -> Hooks | None:
    """Returns the hooks of torch's checkpoint if it is the first, from `hooks` outwards, that saves what is unclaimed.

    It has to be told of the weights that a mode saves, too; of those that do without (above) the answer is None.
    """
    around = beneath_claims(hooks)
    if around is None or hasattr(around[0], "counts_no_weights") or not is_checkpoint_pack(around[0]):
        return None
    return around
