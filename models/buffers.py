"""Gives the buffers of a model that was built on the meta device the values that its construction computes.

Buffers such as rotary frequencies are computed when a model is made, and are in no file of weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from models.built_again import Build, loose_tensors, with_buffers


@torch.no_grad()
def fill_buffers(model: nn.Module, build: Build) -> None:
    """Fills every buffer in place with the value that it has in a model built on the CPU, bit for bit.

    Values are converted to the dtype of the buffer. Buffers of the state dict (those of batch norms, say) get their
    initial values; load weights after this. Parameters and the caller's random numbers are not changed.

    A plain attribute of a module that is a tensor of the meta device, or a list of some (diffusers has such tables of
    rotary places, because complex numbers in buffers would be converted), becomes that of the model built again, on the
    CPU: no `.to` of the model moves it, and the module's forward does.

    Args:
        build: makes the same model again; its buffers take memory, its parameters none.

    Raises:
        ValueError: a buffer is on the meta device; or a buffer or such a tensor has random values, depends on
            parameters or is not in the model built again. Nothing has been written then.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    _refuse([name for name, buffer in buffers.items() if buffer.is_meta], "allocate the memory of the model before")
    loose = {name: tensors for name, tensors in loose_tensors(model).items() if any(t.is_meta for t in tensors)}
    if not buffers and not loose:
        return
    built = with_buffers(build)
    values = dict(built.named_buffers(remove_duplicate=False))
    wrong = [n for n, b in buffers.items() if n not in values or values[n].shape != b.shape or values[n].is_meta]
    made = loose_tensors(built)
    wrong += [
        name
        for name, tensors in loose.items()
        if [tensor.shape for tensor in made.get(name, ())] != [tensor.shape for tensor in tensors]
        or any(tensor.is_meta for tensor in made[name])
    ]
    _refuse(wrong, "the model built again has no value for it, so build this model on the CPU")
    for name, buffer in buffers.items():
        buffer.copy_(values[name])
    for name in loose:
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, getattr(built.get_submodule(path), attribute))


def with_statistics(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the norms that keep running statistics of the examples which they see, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            yield name, module


def _refuse(names: list[str], advice: str) -> None:
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise ValueError(f"{names[0]}{more}: {advice}")
