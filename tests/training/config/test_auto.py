"""A run writes down what it took for `auto`."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from tests.training.helpers.in_process import components_of
from training.config.auto import AUTO, SETTLED
from training.planning.machine import machine_of
from training.planning.plan import plan_filled


@pytest.mark.parametrize("offload", ["layer_stream", "layer_stream_swap"])
def test_settled_keys_hold_the_choice(offload: str):
    components = components_of(f"offload={offload}", "hardware=h200")
    plan_filled(components, machine_of(components), has_gpu=True)
    # Null is a choice for the weights of the model, and for bytes.
    others = [key for key in SETTLED if key not in ("model.weights", "dataset.tokenizer")]
    values = [OmegaConf.select(components.config, key) for key in others]
    # The mode has one of the two keys of resident units.
    assert values.count(None) == 1
    assert AUTO not in values


def test_weights_of_a_source_that_is_an_architecture_are_those_of_the_seed():
    components = components_of("model=hf", "model.source=gpt2", "dataset=synthetic")
    assert "model.weights" in components.settled.reasons
    assert components.config.model.weights is None
