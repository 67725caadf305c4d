"""Losses beside those of the resident run: how far they differ, from which step and why, from records alone."""

from __future__ import annotations

import math

import pytest

from training.comparison.losses import departure, largest_difference

NAN = math.nan


def records(*steps: tuple[float, float | None]) -> list[dict]:
    return [
        {"train/step": number, "train/loss": loss, **({} if norm is None else {"train/grad_norm": norm})}
        for number, (loss, norm) in enumerate(steps, start=1)
    ]


REFERENCE = records((4.0, 1.0), (3.0, 0.9), (2.0, 0.8))


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (records((4.0, 1.0), (3.0, 0.9), (2.0, 0.8)), None),
        (records((4.0, 2.0), (3.0, 0.9), (2.0, 0.8)), None),
        (records((4.0, 0.0), (3.9, 0.0)), "from step 2: the gradients of step 1 are zero"),
        (records((4.0, NAN), (NAN, NAN)), "from step 2: the gradient norm of step 1 is nan"),
        (records((4.0, None), (NAN, None)), "from step 2: it is nan"),
        (records((4.0, 14132.0), (3.5, 2.0)), "from step 2: the gradient norm of step 1 is 1.413e+04, not 1"),
        (records((4.0, 1.001), (3.001, 0.9)), "from step 2: gradients differ by rounding (3.3e-04 in the loss)"),
        (records((4.0, 1.0), (3.5, 0.9)), "from step 2: gradient norms before were equal, the update differs"),
        (records((4.0, None), (3.5, None)), "from step 2: gradient norms before were not recorded, the update"),
        (records((4.004, 1.0)), "from step 1: the forward with the same weights differs by 1.0e-03, another precision"),
        (records((5.0, 1.0)), "from step 1: the forward with the same weights differs by 2.0e-01, another loss"),
    ],
)
def test_the_cause_is_the_earliest_that_was_measured(own: list[dict], why: str | None):
    found = departure(own, REFERENCE)
    assert found is None if why is None else found.startswith(f"the loss differs {why}"), found


def test_equal_losses_that_are_nan_are_no_departure():
    both = records((4.0, 1.0), (NAN, NAN))
    assert departure(both, both) is None


def test_steps_that_only_one_logged_tell_nothing():
    assert departure(REFERENCE, []) is None
    assert departure([{"eval/loss": 1.0, "train/step": 1}], REFERENCE) is None


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ({1: 4.0, 2: 3.0}, {1: 4.0, 2: 3.0}, 0.0),
        ({2: 3.0, 4: 9.0}, {1: 8.0, 2: 3.0}, 0.0),
        ({1: 4.0}, {2: 4.0}, None),
        ({1: 3.0}, {1: 4.0}, 0.25),
        ({1: NAN, 2: math.inf}, {1: NAN, 2: math.inf}, 0.0),
        ({1: NAN}, {1: 4.0}, math.inf),
    ],
)
@pytest.mark.parametrize("key", ["train/loss", "eval/loss"])
def test_the_largest_difference_of_losses(own: dict, other: dict, expected: float | None, key: str):
    logged = [[{"train/step": step, key: loss} for step, loss in curve.items()] for curve in (own, other)]
    assert largest_difference(*logged) == expected
