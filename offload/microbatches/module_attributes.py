"""Attributes of modules while microbatches run side by side: each microbatch reads what it would one after another.

A forward may leave a value in its module (`self.aux_loss = ...`), which the loss reads later; a loss may change what a
forward does (`model.eval()`, another dropout rate). Side by side, the next microbatch overwrites it before it is read.
So each write is noted with its microbatch, and at the begin of a turn modules have, of the microbatches up to this one,
the value of the last that has written.

That value may not be its last: a loss turns adapters off, calls the model, and turns them on again. The next microbatch
has begun with adapters that are off then, which it would not one after another. So this is refused.

So is a hook that a loss registers for its own forward: it would run in those of the others, which are under way. A
first forward may register hooks for good, as those of transformers do, on modules that no other has called yet.

What else is inside of a value (a list that grows, a counter in another object) is not seen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.torch_private.block_attributes import MISSING, changed
from offload.torch_private.running_microbatch import SideBySideError
from offload.torch_private.torch_internals import hook_numbers


class ModuleAttributes:
    """The plain attributes of some modules, by microbatch."""

    def __init__(self, modules: Iterable[nn.Module], entrances: Mapping[nn.Module, Collection[nn.Module]]):
        """Takes the modules whose calls are told to `entered`, each with those that are called in it only."""
        self._modules, self._entrances = list(modules), entrances
        self._attributes = [vars(module) for module in self._modules]
        # By the number of the module and the name of the attribute: the values, by microbatch. -1: that of before.
        self._written: dict[tuple[int, str], dict[int, object]] = {}
        # By the same: pairs of a microbatch that has written, and a later one that has begun a turn with its value.
        self._passed_on: dict[tuple[int, str], set[tuple[int, int]]] = {}
        self._begun: set[int] = set()
        # Entrances that others than the first microbatch have called.
        self._entered: set[nn.Module] = set()
        # The hooks that the first microbatch has registered, and their modules.
        self._new_hooks: list[tuple[nn.Module, int]] = []
        self._refused = False

    @contextmanager
    def turn(self, microbatch: int) -> Iterator[None]:
        """Surrounds a turn of a microbatch.

        Raises SideBySideError, once, if it changes a value that a later microbatch has had from it, and still has, or
        registers or removes a hook that others would find, or miss, otherwise.
        """
        self._show(microbatch)
        self._begun.add(microbatch)
        first_new = RemovableHandle.next_id
        before = [dict(attributes) for attributes in self._attributes]
        try:
            yield
        finally:
            written = [
                (number, name)
                for number, (attributes, old) in enumerate(zip(self._attributes, before, strict=True))
                for name in changed(attributes, old)
            ]
            for number, name in written:
                values = self._written.setdefault((number, name), {-1: before[number].get(name, MISSING)})
                values[microbatch] = self._attributes[number].get(name, MISSING)
        for key in written:
            self._check_passed_on(microbatch, key)
        if RemovableHandle.next_id > first_new:
            self._check_new_hooks(microbatch, first_new)
        for module, number in self._new_hooks:
            if number not in hook_numbers(module):
                self._refuse(f"a hook on a {type(module).__name__} is removed")

    def entered(self, module: nn.Module, microbatch: int | None) -> None:
        """Notes that `microbatch` calls an entrance; None: a recompute, which is of all of them."""
        if microbatch:
            self._entered.add(module)

    def end(self, count: int) -> None:
        """Leaves what the last of `count` microbatches would have left."""
        self._show(count - 1)
        self._written.clear()
        self._passed_on.clear()

    def _check_passed_on(self, microbatch: int, key: tuple[int, str]) -> None:
        number, name = key
        later = (other for writer, other in self._passed_on.get(key, ()) if writer == microbatch)
        # One that has written the attribute itself since reads its own value.
        if any(other not in self._written[key] for other in later):
            self._refuse(f"{name} of a {type(self._modules[number]).__name__} is changed twice")

    def _check_new_hooks(self, microbatch: int, first_new: int) -> None:
        for module in self._modules:
            for number in hook_numbers(module):
                if number < first_new:
                    continue
                if microbatch > 0 or not self._only_first_called(module):
                    self._refuse(f"a hook on a {type(module).__name__} is registered")
                self._new_hooks.append((module, number))

    def _only_first_called(self, module: nn.Module) -> bool:
        """Returns False where another microbatch than the first has called `module`, or may have."""
        if self._begun == {0}:
            return True
        entrances = [entrance for entrance, inside in self._entrances.items() if module in inside]
        return bool(entrances) and self._entered.isdisjoint(entrances)

    def _refuse(self, what: str) -> None:
        # The other microbatches still have turns, in which they end.
        if not self._refused:
            self._refused = True
            raise SideBySideError(what)

    def _show(self, microbatch: int) -> None:
        for (number, name), values in self._written.items():
            writer = max(each for each in values if each <= microbatch)
            if 0 <= writer < microbatch:
                self._passed_on.setdefault((number, name), set()).add((writer, microbatch))
            value = values[writer]
            if value is MISSING:
                self._attributes[number].pop(name, None)
            else:
                self._attributes[number][name] = value
