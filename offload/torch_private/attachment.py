"""Remembers which modules have an offload mode: each module has one at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_mode_of: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


class Attachment:
    """Notes that the modules of `model`, those inside it too, have the mode called `mode`, until `release`.

    Raises RuntimeError in one line, noting nothing, where one of them has a mode already: because it, a module around
    it or one inside it was attached before.
    """

    def __init__(self, model: nn.Module, mode: str):
        modules = dict(model.named_modules())
        for name, module in modules.items():
            if module in _mode_of:
                raise RuntimeError(
                    f"{name or type(module).__name__} is attached already, to the mode {_mode_of[module]}: detach that"
                    " mode before you attach another"
                )
        self._modules = list(modules.values())
        for module in self._modules:
            _mode_of[module] = mode

    def release(self) -> None:
        """Forgets the mode: the modules may be attached again."""
        for module in self._modules:
            _mode_of.pop(module, None)


@contextmanager
def attaching(model: nn.Module, mode: object, streams: object) -> Iterator[Attachment]:
    """Surrounds what attaches `mode` to `model`. Gives the attachment, which an exception in the block releases.

    Raises TypeError in one line for a device in place of its streams.
    """
    if isinstance(streams, (str, torch.device)):
        raise TypeError(f"attach to {streams!r}: give the streams of a device, as offload.acquire({streams!r}) returns")
    # A mode is known by the file that it is in.
    attachment = Attachment(model, type(mode).__module__.rpartition(".")[2])
    try:
        yield attachment
    except BaseException:
        attachment.release()
        raise
