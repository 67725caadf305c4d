"""A knob's error gets the path of its key from whoever knows it."""

import pickle

import pytest

from offload.errors import KnobError, knobs_under


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
