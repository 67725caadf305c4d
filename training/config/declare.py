"""Declares keys of the configuration: numbers with ranges, and dataclasses made from the arguments of a class.

A key may be `auto`: then a run chooses its value.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_origin, get_type_hints

from omegaconf import MISSING

AUTO = "auto"
# seq_len of a plan: the longest that fits.
LONGEST = "max"
# By key, what stands there until a run writes down what it took: one that was refused before that has it still.
SETTLED = {
    "precision": AUTO,
    "microbatches": AUTO,
    "offload.resident": AUTO,
    "offload.weights.resident": AUTO,
    "model.weights": AUTO,
    "dataset.tokenizer": AUTO,
    "optimizer.lr": AUTO,
    "optimizer.weight_decay": AUTO,
    "schedule.warmup": AUTO,
    "seq_len": AUTO,
    "recompute.blocks": "null",
    "recompute.tile": AUTO,
}


def number(
    at_least: float | None = None, above: float | None = None, at_most: float | None = None, words: tuple[str, ...] = ()
) -> Any:
    """Declares a numeric key, whose range `training.config.validation` checks. Its value comes from YAML.

    `words` are what it may be besides, with `auto`.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most}
    return field(default=MISSING, metadata=bounds | ({"words": words} if words else {}))


@dataclass
class Built:
    """An option that becomes an object: its keys are the arguments of `_target_`, as plain Python values."""

    _target_: str = MISSING
    _convert_: str = "all"


def renamed(base: type, target: str) -> type:
    """Makes the dataclass of an option that has the keys of `base`, and `target` as its `_target_`."""
    return dataclasses.make_dataclass(target.rpartition(".")[2], [("_target_", str, target)], bases=(base,))


def schema_of(target: type, given: frozenset[str] = frozenset(), or_auto: frozenset[str] = frozenset()) -> type:
    """Makes the dataclass of the option that makes a `target`: a key for each argument, with its type and default.

    Arguments in `given` come from code and are no keys. Keys in `or_auto` are a number or the word auto. A Literal
    becomes a string, which the class itself checks.
    """
    keys = [
        (
            name,
            int | float | str if name in or_auto else str if get_origin(kind) is Literal else kind,
            field(default_factory=default.copy) if isinstance(default, list) else field(default=default),
        )
        for name, kind, default in _arguments(target)
        if name not in given
    ]
    path = ("_target_", str, field(default=f"{target.__module__}.{target.__qualname__}"))
    return dataclasses.make_dataclass(target.__name__, [path, *keys], bases=(Built,))


def _arguments(target: type) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, type and default of the arguments of a class."""
    if not dataclasses.is_dataclass(target):
        hints = get_type_hints(target.__init__)
        for name, argument in inspect.signature(target).parameters.items():
            yield name, hints[name], MISSING if argument.default is argument.empty else argument.default
        return
    hints = get_type_hints(target)
    for entry in dataclasses.fields(target):
        has_default = entry.default is not dataclasses.MISSING
        if not has_default and entry.default_factory is dataclasses.MISSING:
            yield entry.name, Any, MISSING
        else:
            yield entry.name, hints[entry.name], entry.default if has_default else entry.default_factory()
