"""Knobs hold their values to the declarations, and are explained by docstrings; sizes in bytes are read and written."""

import pickle
from dataclasses import dataclass
from typing import Literal

import pytest

from offload.knobs import (
    GIB,
    KnobError,
    check_knobs,
    explanations,
    format_bytes,
    in_range,
    knob,
    knobs_under,
    nbytes,
    parse_bytes,
)


@dataclass(kw_only=True)
class Mode:
    """A mode.

    Args:
        slots: units on the
            device.
        include, exclude: patterns: of names.

    Not an argument: this.
    """

    slots: int = knob(4, at_least=1, at_most=9)
    prefetch: int | None = knob(None, at_least=0)
    include: list[str] = knob([])
    exclude: list[str] = knob([])
    pin: Literal["auto", "off"] = knob("auto")
    room: str | int = nbytes("1KiB")
    budget: str | int = nbytes(0, or_else="auto")

    def __post_init__(self) -> None:
        check_knobs(self)


@dataclass(kw_only=True)
class Derived(Mode):
    """Another.

    Args:
        slots: blocks on the device.
    """

    slots: int = knob(2, at_least=1)


def test_defaults_are_those_of_the_declaration():
    mode = Mode()
    assert (mode.slots, mode.prefetch, mode.pin, mode.room, mode.budget) == (4, None, "auto", 1024, 0)
    assert Derived().slots == 2
    mode.include.append("x")
    assert Mode().include == []


def test_sizes_become_bytes_and_words_stay():
    mode = Mode(room="2MiB", budget="auto")
    assert (mode.room, mode.budget) == (2 * 2**20, "auto")
    assert Mode(budget="512B").budget == 512


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"slots": 0}, "slots=0: must be at least 1"),
        ({"slots": 10}, "slots=10: must be at most 9"),
        ({"prefetch": -1}, "prefetch=-1: must be at least 0"),
        ({"pin": "on"}, "pin=on: must be auto or off"),
        ({"room": "2GB"}, "room=2GB: must be bytes, such as 2GiB, 512MiB or 4096"),
        ({"room": None}, "room=None: must be bytes, such as 2GiB, 512MiB or 4096"),
        ({"room": "auto"}, "room=auto: must be bytes, such as 2GiB, 512MiB or 4096"),
        ({"budget": "all"}, "budget=all: must be bytes, such as 2GiB, 512MiB or 4096, or auto"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(values: dict, message: str):
    with pytest.raises(KnobError) as caught:
        Mode(**values)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("value", "bounds", "problem"),
    [
        (float("nan"), {"at_least": 0}, "must be at least 0"),
        (float("nan"), {"above": 0}, "must be above 0"),
        (float("nan"), {"at_most": 0}, "must be at most 0"),
        (float("inf"), {}, "must be finite"),
        (0.0, {"above": 0}, "must be above 0"),
    ],
)
def test_numbers_out_of_range(value: float, bounds: dict, problem: str):
    with pytest.raises(KnobError, match=problem):
        in_range("lr", value, **bounds)
    assert in_range("lr", 0.5, at_least=0, above=0, at_most=1) == 0.5


def test_explanations_are_those_of_the_class_then_of_its_bases():
    expected = {"slots": "units on the device.", "include": "patterns: of names.", "exclude": "patterns: of names."}
    assert explanations(Mode) == expected
    assert explanations(Derived) == expected | {"slots": "blocks on the device."}
    assert explanations(int) == {}


def test_sizes_in_bytes():
    assert [parse_bytes("k", text) for text in ("2GiB", "1.5MiB", "4096", 7, "8B")] == [
        2 * 2**30,
        3 * 2**19,
        4096,
        7,
        8,
    ]


@pytest.mark.parametrize("wrong", ["2GB", "-1", "many", "-2MiB", "infGiB", "1.5", "", "GiB"])
def test_other_text_is_refused_with_key_and_value(wrong: str):
    with pytest.raises(ValueError, match=f"k={wrong}: must be bytes"):
        parse_bytes("k", wrong)


def test_sizes_for_people():
    assert [format_bytes(nbytes) for nbytes in (0, 3 * 2**19, 2**28 - 1, 2**28, 3 * GIB // 2)] == [
        "0.00 MiB",
        "1.50 MiB",
        "256.00 MiB",
        "0.25 GiB",
        "1.50 GiB",
    ]


def test_a_formatted_size_can_be_parsed():
    assert parse_bytes("k", format_bytes(3 * GIB).replace(" ", "")) == 3 * GIB


def test_the_message_names_knob_value_and_problem():
    error = KnobError("slots", 0, "must be at least 1")
    assert str(error) == "slots=0: must be at least 1"
    assert isinstance(error, ValueError)
    assert str(error.under("weights").under("offload")) == "offload.weights.slots=0: must be at least 1"


def test_it_passes_between_processes():
    assert str(pickle.loads(pickle.dumps(KnobError("slots", 0, "no")))) == "slots=0: no"


def test_a_block_puts_its_path_before_the_knob_and_keeps_the_cause():
    cause = ImportError("nowhere")
    with pytest.raises(KnobError) as caught, knobs_under("weights"):
        raise KnobError("predicate", "x", "cannot be imported") from cause
    assert str(caught.value) == "weights.predicate=x: cannot be imported"
    assert caught.value.__cause__ is cause


def test_other_errors_pass_through_a_block():
    with pytest.raises(ValueError, match=r"^of the user$"), knobs_under("weights"):
        raise ValueError("of the user")


def test_a_value_with_line_breaks_is_shown_in_one_line():
    assert str(KnobError("trained", "a\nb", "must be stream or device")) == r"trained='a\nb': must be stream or device"
