"""The step before shows which gradients are final."""

import pytest

from offload.weights.gradients.final import FinalGradients
from offload.weights.units.unit import OffloadUnit
from tests.offload.helpers.units import unit_of_two


@pytest.fixture
def unit() -> OffloadUnit:
    return unit_of_two()


def step(final: FinalGradients, unit: OffloadUnit, *events: str) -> list[bool]:
    """`+0` lands the gradient of tensor 0, `?0` uses the tensor. Returns whether each landed gradient was final."""
    final.begin_step([unit])
    final.counting = True
    found = []
    for kind, index in events:
        tensor = unit.tensors[int(index)]
        if kind == "+":
            found.append(final.land(unit, tensor))
        else:
            final.use(unit, tensor)
    final.end_step()
    return found


def test_a_gradient_is_final_if_all_of_its_unit_landed_once_in_the_step_before(unit: OffloadUnit):
    final = FinalGradients()
    assert step(final, unit, "?0", "?1", "+1", "+0") == [False, False]
    assert step(final, unit, "?0", "?1", "+1", "+0") == [True, True]
    assert step(final, unit, "+1") == [True]
    assert step(final, unit, "+1", "+0") == [False, False]
    assert step(final, unit, "+1", "+0") == [True, True]


def test_a_unit_whose_weights_are_used_after_their_gradients_is_not_trusted(unit: OffloadUnit):
    final = FinalGradients()
    for _ in range(3):
        assert step(final, unit, "+1", "?1", "+0") == [False, False]
    assert step(final, unit, "+1", "?0", "+0") == [False, False]
    assert step(final, unit, "+1", "?0", "+0") == [True, True]


def test_pieces_of_a_gradient_are_not_final(unit: OffloadUnit):
    final = FinalGradients()
    for _ in range(3):
        assert step(final, unit, "+1", "+0", "+0") == [False] * 3


@pytest.mark.parametrize(("late", "message"), [("+0", "came after the last"), ("?0", "is needed after its gradient")])
def test_late_gradients_and_uses_that_are_new_in_this_step_are_refused(late: str, message: str, unit: OffloadUnit):
    final = FinalGradients()
    step(final, unit, "+1", "+0")
    with pytest.raises(RuntimeError, match=f"first {message}"):
        step(final, unit, "+1", "+0", late)


def test_nothing_is_refused_outside_of_steps_and_nothing_learned_before_it_counts(unit: OffloadUnit):
    final = FinalGradients()
    step(final, unit, "+1", "+0")
    step(final, unit, "+1", "+0")
    final.use(unit, unit.tensors[0])
    final.begin_step([unit])
    assert [final.land(unit, tensor) for tensor in unit.tensors] == [False, False]
