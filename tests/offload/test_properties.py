"""For any model, mode and knobs, the numbers are those of the resident model, bit for bit.

Examples come from a fixed seed. To try others: HYPOTHESIS_PROFILE=hunt pytest tests/offload/test_properties.py, and for
programmes of updates UPDATE_SEEDS=1000:2000.
"""

import os

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from offload.modes import shard_offload
from offload.modes.none import Resident
from tests.offload.helpers import updates
from tests.offload.helpers.models import assert_same, same_as_resident, with_copy
from tests.offload.helpers.modes import recomputing
from tests.offload.helpers.random_models import Assembled, Spec, activation_modes, built, shards, specs, weight_modes
from tests.offload.helpers.random_updates import assert_same_as_in_turn
from tests.offload.helpers.small import swap_small

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
settings.register_profile("ci", derandomize=True, max_examples=100, **COMMON)
settings.register_profile("hunt", max_examples=100_000, print_blob=True, **COMMON)
PROFILE = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@pytest.fixture(autouse=True)
def little_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the saved tensors of these small models leave the device, and some come back ahead of use."""
    swap_small(monkeypatch)
    monkeypatch.setattr(shard_offload, "IN_FLIGHT_BYTES", 300)


def fitting(mode: tuple[str, dict], model: Assembled):
    """Makes the mode if its knobs fit the model; otherwise drops the example."""
    made = built(mode)
    try:
        made.footprint(model)
    except ValueError:
        assume(False)
    return made


def comparable(spec: Spec, mode: tuple[str, dict], microbatches: int) -> bool:
    """Returns False where running statistics see the forwards of microbatches in another order.

    They do where a block runs several times in a step for one microbatch: used twice, or in a user's checkpoint.
    """
    several_times = len(spec.order) > len(set(spec.order)) or spec.checkpointing is not None
    return not (shards(mode) and microbatches > 1 and spec.has_statistics and several_times)


@settings(PROFILE)
@given(
    spec=specs(),
    mode=weight_modes() | activation_modes(),
    microbatches=st.integers(1, 3),
    steps=st.integers(2, 3),
    recomputed=st.booleans(),
)
@pytest.mark.slow
def test_losses_gradients_and_updates_are_the_resident_models(spec, mode, microbatches, steps, recomputed):
    assume(comparable(spec, mode, microbatches))
    model = Assembled(spec)
    made = fitting(mode, model)
    same_as_resident(
        model, recomputing(made) if recomputed else made, model.inputs, steps=steps, microbatches=microbatches
    )


@settings(PROFILE, max_examples=PROFILE.max_examples // 2)
@given(
    spec=specs(),
    mode=weight_modes() | activation_modes(),
    microbatches=st.integers(1, 3),
    clip_norm=st.sampled_from([None, 0.1]),
    early=st.booleans(),
    device_share=st.sampled_from([0, 0, 2000, 2**20]),
)
@pytest.mark.slow
def test_updates_behind_the_step_are_the_resident_models(spec, mode, microbatches, clip_norm, early, device_share):
    assume(comparable(spec, mode, microbatches))
    moved, resident = with_copy(Assembled(spec))
    options = {"steps": 3, "microbatches": microbatches, "clip_norm": clip_norm, "inputs": moved.inputs}
    early = early and clip_norm is None
    seen = updates.train(moved, fitting(mode, moved), early, device_share=device_share, **options)
    expected = updates.train(resident, Resident(), **options)
    # Losses, weights and buffers. The states between them differ: those on the device have masters.
    losses, ends = 3 * microbatches, len(moved.state_dict())
    assert_same(seen[:losses] + seen[-ends:], expected[:losses] + expected[-ends:])


SEEDS = range(*map(int, os.environ.get("UPDATE_SEEDS", "0:12").split(":")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pace", ["as it is", pytest.param("slow", marks=pytest.mark.slow)])
def test_programmes_of_updates_see_what_they_see_in_turn(seed: int, pace: str, monkeypatch: pytest.MonkeyPatch):
    if pace == "slow":
        updates.sleepy(monkeypatch, seconds=0.002)
    assert_same_as_in_turn(seed)
