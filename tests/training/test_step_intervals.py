"""The steps after which something is done."""

from __future__ import annotations

import pytest

from training.step_intervals import due


@pytest.mark.parametrize(("every", "steps"), [(None, []), (1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (9, [0, 5])])
def test_every_so_many_steps_and_after_the_last(every: int | None, steps: list[int]):
    assert [step for step in range(6) if due(every, step, 5)] == steps
