"""The dtypes of a model of diffusers or transformers: those that the library's own `from_pretrained` gives it.

The library makes the model with that dtype as torch's default, so a table that its class computes in float32 stays
float32; it converts what files store, but for the names that a class wants in float32. `.to(dtype)` knows neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

Keeps = Callable[[str], bool]
"""whether the parameter or buffer of that name stays float32"""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Makes floating-point tensors of `dtype` inside the block, where none is named."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def keep_float32(model: nn.Module, keeps: Keeps, others: torch.dtype | None = None) -> None:
    """Gives the floating-point tensors of the state dict float32 where `keeps` says so, and `others` elsewhere.

    `others`: None leaves the dtypes in which the model was made. Tables outside the state dict stay as they were made.
    """
    for name, tensor in model.state_dict(keep_vars=True).items():
        dtype = torch.float32 if keeps(name) else others
        if tensor.is_floating_point() and dtype is not None:
            tensor.data = tensor.data.to(dtype)


def kept_by_diffusers(made: type[nn.Module]) -> Keeps:
    """Returns which tensors of a class of diffusers its `from_pretrained` keeps in float32."""
    names = made._keep_in_fp32_modules or ()
    kept = {names} if isinstance(names, str) else set(names)
    return lambda name: not kept.isdisjoint(name.split("."))
