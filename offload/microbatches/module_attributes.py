"""Attributes of modules while microbatches run side by side: each microbatch reads what it would one after another.

A forward may leave a value in its module (`self.aux_loss = ...`), which the loss reads later; a loss may change what a
forward does (`model.eval()`, another dropout rate). Side by side, the next microbatch overwrites it before it is read.
So each write is noted with its microbatch, and at the begin of a turn modules have, of the microbatches up to this one,
the value of the last that has written.

What is inside of a value (a list that grows, a counter in another object) is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from offload.runtime.forward.block_attributes import MISSING, changed


class ModuleAttributes:
    """The plain attributes of some modules, by microbatch."""

    def __init__(self, modules: Iterable[nn.Module]):
        self._attributes = [vars(module) for module in modules]
        # By the number of the module and the name of the attribute: the values, by microbatch. -1: that of before.
        self._written: dict[tuple[int, str], dict[int, object]] = {}

    @contextmanager
    def turn(self, microbatch: int) -> Iterator[None]:
        """Surrounds a turn of a microbatch."""
        self._show(microbatch)
        before = [dict(attributes) for attributes in self._attributes]
        try:
            yield
        finally:
            for number, (attributes, old) in enumerate(zip(self._attributes, before, strict=True)):
                for name in changed(attributes, old):
                    values = self._written.setdefault((number, name), {-1: old.get(name, MISSING)})
                    values[microbatch] = attributes.get(name, MISSING)

    def end(self, count: int) -> None:
        """Leaves what the last of `count` microbatches would have left."""
        self._show(count - 1)
        self._written.clear()

    def _show(self, microbatch: int) -> None:
        for (number, name), values in self._written.items():
            value = values[max(each for each in values if each <= microbatch)]
            if value is MISSING:
                self._attributes[number].pop(name, None)
            else:
                self._attributes[number][name] = value
