"""Quantised weights on a real device: copied in time, in the right stream, and as resident ones compute."""

import pytest

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.shard_offload import ShardOffload
from tests.offload.helpers.late import ON_A_GPU
from tests.offload.helpers.quantised import KINDS, Model, same_as_resident

pytestmark = ON_A_GPU


@pytest.mark.usefixtures("delayed", "poisoned")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("knobs", [{"slots": 1}, {"slots": 2, "trained": "device"}], ids=str)
def test_equals_resident(knobs: dict, kind: str):
    same_as_resident(Model(kind), LayerStream(**knobs), device="cuda")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [BounceLinear, ShardOffload])
def test_other_modes_equal_resident(mode: type, kind: str):
    same_as_resident(Model(kind), mode(slots=1), recomputes=mode is BounceLinear, device="cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_was_on_the_gpu_is_there_again(kind: str):
    model = Model(kind).to("cuda")
    kinds = [type(parameter) for parameter in model.parameters()]
    same_as_resident(model, LayerStream(slots=2), device="cuda")
    assert [type(parameter) for parameter in model.parameters()] == kinds
    assert all(parameter.device.type == "cuda" for parameter in model.parameters())
