"""The share of the weights that is not quantised, and what the plan says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from models.quantise import QuantisedWeight
from tests.training.helpers.in_process import SMALL_MODEL, components_of
from training.planning.dry_step import dry_step
from training.planning.machine import machine_of
from training.planning.plan import plan_run
from training.planning.quantised import unquantised_note

# The embedding and the head are half of such a model.
MODEL = (*SMALL_MODEL, "model.vocab_size=512")


def test_the_largest_that_are_not_quantised_are_named():
    components = components_of(*MODEL, "quantize=int8")
    note = unquantised_note(components)
    assert note == (
        "64% of the weights, in bytes without quantising, are not quantised:"
        " model.embed_tokens.weight (0.06 MiB), lm_head.weight (0.06 MiB)"
    )
    assert note in plan_run(components, machine_of(components), has_gpu=True).notes


@pytest.mark.parametrize(("quantize", "read_and_written"), [("int8", 1 + 4 + 4 + 2), ("nf4", 0.5 + 2)])
@pytest.mark.parametrize("offload", ["none", "layer_stream"])
@pytest.mark.slow
def test_a_plan_counts_the_time_to_dequantise(offload: str, quantize: str, read_and_written: float):
    keys = (*MODEL, "precision=bf16", f"quantize={quantize}", f"offload={offload}", "hardware=h200")
    components = components_of(*keys)
    step = dry_step(components, has_gpu=True)
    numbers = sum(each.numel() for each in components.model.parameters() if isinstance(each, QuantisedWeight))
    for phase in step.phases:
        # Besides, a scale is read for each row.
        assert phase.dequantised_bytes == pytest.approx(read_and_written * numbers, rel=0.05)
    machine = machine_of(components)
    slow, fast = (
        plan_run(components, replace(machine, device_gb_s=rate), has_gpu=True).forecast.alone_ms["compute"]
        for rate in (1.0, 2.0)
    )
    expected_ms = sum(phase.dequantised_bytes for phase in step.phases) / 1e6
    assert slow - fast == pytest.approx(expected_ms / 2, rel=0.05)


@pytest.mark.parametrize("keys", [(), ("quantize=int8", "quantize.exclude=['*.mlp.*']")])
def test_no_note_where_nothing_is_quantised_or_the_user_chose(keys: tuple[str, ...]):
    assert unquantised_note(components_of(*MODEL, *keys)) is None


def test_no_note_where_nearly_all_is_quantised():
    keys = (*SMALL_MODEL, "model.vocab_size=256", "model.hidden_size=128", "model.intermediate_size=4096")
    assert unquantised_note(components_of(*keys, "quantize=int8")) is None
