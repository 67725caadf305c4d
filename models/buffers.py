"""Gives the buffers of a model that was built on the meta device the values that its construction computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _EmptyOnMeta(TorchFunctionMode):
    """Makes tensors without values on the meta device, and all others where they would be.

    Layers make their parameters with torch.empty and fill them afterwards, which takes no time there. Tables are made
    with values.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@torch.no_grad()
def fill_buffers(model: nn.Module, build: Callable[[], nn.Module]) -> None:
    """Copies into the buffers of `model` those of `build()`, which makes the same model; converts to their dtypes.

    The values are those of a construction on the CPU, bit by bit. The second model has memory for its buffers, and for
    the few parameters that are made with values; for no matrix of a layer.

    Raises:
        ValueError: a buffer is on the meta device, is unknown to `build()`, or has another shape there; or its values
            cannot be computed without those of the parameters. Nothing has been written then.
    """
    targets = dict(model.named_buffers())
    if not targets:
        return
    generator = torch.random.get_rng_state()
    try:
        with torch.device("cpu"), _EmptyOnMeta():
            values = dict(build().named_buffers())
    finally:
        # What a construction draws is thrown away with it.
        torch.random.set_rng_state(generator)
    for name, target in targets.items():
        value = values.get(name)
        if target.is_meta:
            raise ValueError(f"{name} is on the meta device: allocate its memory before filling it")
        if value is None or value.shape != target.shape:
            raise ValueError(f"{name} has no values: a new model of this kind has no such buffer of this shape")
        if value.is_meta:
            raise ValueError(f"{name} has no values: it depends on parameters; build the model on the CPU")
    for name, target in targets.items():
        target.copy_(values[name])
