"""Knobs of a mode: each is declared once, as a field of the mode's dataclass, with its type, default and range.

    @dataclass(kw_only=True, eq=False)
    class MyMode(WeightMode):
        slots: int = knob(2, at_least=1)
        outside: Literal["resident", "stream"] = knob("resident")

`check_knobs` holds the values to the declarations. The configuration takes names, types and defaults from the same
fields (`training.config.modes`), and the explanations from the `Args:` section of the docstrings (`explanations`).
Sizes in bytes are written as people write them: "2GiB", "512MiB", or a plain number (`parse_bytes`, `format_bytes`,
`GIB`).

Public are `knob`, `in_range`, `one_of`, `explanations`, `parse_bytes`, `format_bytes` and `GIB`.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

OUTSIDE_STEP = (
    "forward with gradients outside a step: wrap forward and backward in `with attached.step():`,"
    " or evaluation in torch.no_grad()"
)


def refuse_part(name: str, tensor: Tensor) -> None:
    """Raises ValueError in one line for a DTensor, of which this process may have a part, as FSDP2 makes them."""
    # Whoever has made one has imported it, to its end: another thread may be importing it now.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is not None and isinstance(tensor, kind):
        raise ValueError(
            f"{name} is a DTensor, of which this process may have a part: a mode moves whole tensors: leave out"
            " fully_shard, parallelize_module and distribute_tensor"
        )


class KnobError(ValueError):
    """A knob has a value that it cannot have: the message is `KNOB=VALUE: PROBLEM`.

    The engine names the knob alone (`slots=0: must be at least 1`). Whoever passes the knob on knows where it stands
    in the configuration and puts the path before it (`under`).
    """

    def __init__(self, knob: str, value: object, problem: str):
        # The arguments as they are, so that the error can be pickled, as between processes.
        super().__init__(knob, value, problem)
        self.knob, self.value, self.problem = knob, value, problem

    def __str__(self) -> str:
        value = str(self.value)
        # A text may hold line breaks, and the message is one line.
        return f"{self.knob}={value if value.isprintable() else repr(value)}: {self.problem}"

    def under(self, path: str) -> KnobError:
        """Returns the same error with `path.` before the name of the knob."""
        return KnobError(f"{path}.{self.knob}", self.value, self.problem)


@contextmanager
def knobs_under(path: str) -> Iterator[None]:
    """Raises each KnobError of the block again with `path.` before the name of its knob."""
    try:
        yield
    except KnobError as error:
        raise error.under(path) from error.__cause__


__all__ = ["GIB", "explanations", "format_bytes", "in_range", "knob", "one_of", "parse_bytes"]

GIB = 2**30
UNITS = {"TiB": 2**40, "GiB": GIB, "MiB": 2**20, "KiB": 2**10, "B": 1}


def parse_bytes(key: str, value: str | int) -> int:
    """Returns the number of bytes that `value` stands for: an int, or a string such as "2GiB", "1.5MiB" or "4096".

    Raises KnobError naming `key` and the value for anything else.
    """
    text = str(value).strip()
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    try:
        amount = float(text.removesuffix(unit)) if unit else int(text)
        if amount >= 0:
            return int(amount * UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        pass
    raise KnobError(key, value, "must be bytes, such as 2GiB, 512MiB or 4096")


def format_bytes(nbytes: int) -> str:
    """Returns `nbytes` for people to read: "1.50 GiB" from a quarter of a GiB on, else "12.00 MiB"."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB // 4 else f"{nbytes / 2**20:.2f} MiB"


def knob(default: Any, *, at_least: float | None = None, at_most: float | None = None) -> Any:
    """Returns a field for a knob of any type but bytes. A list is the default of this one object alone.

    One of several words has their type, `Literal["auto", "off"]`, which `check_knobs` holds it to.
    """

    def checked(name: str, value: Any) -> Any:
        if isinstance(default, list) and isinstance(value, str):
            # A text is a list of letters.
            raise KnobError(name, value, f"must be a list, such as [{value!r}]")
        return value if value is None else in_range(name, value, at_least=at_least, at_most=at_most)

    return _declared(default, checked)


def nbytes(default: str | int, *, or_else: str = "") -> Any:
    """Returns a field for a number of bytes: an int, or a string such as "512MiB", which `check_knobs` makes an int.

    The word `or_else` is allowed too, and kept as it is.
    """
    if or_else:
        return _declared(default, lambda name, value: bytes_or(or_else, name, value))
    return _declared(default, parse_bytes)


def bytes_or(other: str, name: str, value: Any) -> Any:
    """Returns `value` in bytes, or as it is where it is `other`. Raises KnobError where it is neither."""
    if value == other:
        return value
    try:
        return parse_bytes(name, value)
    except KnobError as error:
        raise KnobError(name, value, f"{error.problem}, or {other}") from None


def one_of(name: str, value: str, *choices: str) -> str:
    """Returns `value`. Raises KnobError naming the choices where it is none of them."""
    if value not in choices:
        raise KnobError(name, value, f"must be {', '.join(choices[:-1])} or {choices[-1]}")
    return value


def in_range(
    name: str, value: Any, *, at_least: float | None = None, above: float | None = None, at_most: float | None = None
) -> Any:
    """Returns `value`. Raises KnobError where it is a number that is infinite or out of range. NaN is in no range."""
    if isinstance(value, float) and math.isinf(value):
        raise KnobError(name, value, "must be finite")
    # Written so that NaN is refused.
    if at_least is not None and not value >= at_least:
        raise KnobError(name, value, f"must be at least {at_least}")
    if above is not None and not value > above:
        raise KnobError(name, value, f"must be above {above}")
    if at_most is not None and not value <= at_most:
        raise KnobError(name, value, f"must be at most {at_most}")
    return value


def check_knobs(owner: Any) -> None:
    """Holds every knob of the dataclass `owner` to its declaration. Raises KnobError for the first that does not fit.

    Sizes become bytes.
    """
    choices = choices_of(type(owner))
    for entry in fields(owner):
        if checked := entry.metadata.get("checked"):
            setattr(owner, entry.name, checked(entry.name, getattr(owner, entry.name)))
        if entry.name in choices:
            one_of(entry.name, getattr(owner, entry.name), *choices[entry.name])


@cache
def choices_of(owner: Callable[..., Any]) -> dict[str, tuple[str, ...]]:
    """Returns the values of each field of a class, or argument of a function, whose type is a `Literal`."""
    return {name: get_args(hint) for name, hint in get_type_hints(owner).items() if get_origin(hint) is Literal}


def explanations(owner: type) -> dict[str, str]:
    """Returns the explanation of each knob of a class: its entry in the `Args:` section of the docstring of the class.

    A knob that the class does not explain has the explanation of a class that it derives from.
    """
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        doc = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        section = re.search(r"^Args:\n((?: .*\n|\n)*)", doc + "\n", re.MULTILINE)
        for entry in re.split(r"\n(?=    \w)", section[1].rstrip()) if section else ():
            names, _, text = entry.partition(": ")
            found |= dict.fromkeys(re.findall(r"\w+", names), " ".join(text.split()))
    return found


def _declared(default: Any, checked: Callable[[str, Any], Any]) -> Any:
    default = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**default, metadata={"checked": checked})
