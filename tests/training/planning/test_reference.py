"""The forwards of a reference in a plan: a note with their time, where a GPU is planned for."""

from __future__ import annotations

import re

import pytest

from tests.training.helpers.in_process import SMALL_MODEL, components_of
from training.planning.machine import machine_of
from training.planning.plan import plan_run
from training.planning.reference import reference_note

PAIRS = (
    *(key for key in SMALL_MODEL if not key.startswith("dataset")),
    "task=dpo",
    "dataset=preferences",
    "dataset.files=a.jsonl",
    "model.hidden_size=512",
    "seq_len=512",
)


def ms_of(note: str) -> float:
    (found,) = re.findall(r"about ([\d.,]+) (?:ms|s) ", note)
    return float(found.replace(",", ""))


@pytest.mark.parametrize("offload", ["none", "layer_stream"])
def test_an_adapter_that_is_switched_off_takes_a_forward_of_each_step(offload: str) -> None:
    keys = (*PAIRS, f"offload={offload}", "adapter=lora", "batch_size=64")
    components = components_of(*keys, "microbatches=2")
    plan = plan_run(components, machine_of(components), has_gpu=True)
    (note,) = (note for note in plan.notes if note.startswith("task.reference=adapter: a step begins with a forward"))
    assert note.endswith(" ms that are not in its planned time")
    assert 0 < ms_of(note) < plan.forecast.step_ms
    one = components_of(*keys, "microbatches=1")
    assert ms_of(note) == pytest.approx(ms_of(reference_note(one, machine_of(one), has_gpu=True)), rel=0.2, abs=1)


def test_a_cached_reference_takes_a_forward_of_every_pair() -> None:
    components = components_of(*PAIRS)
    note = reference_note(components, machine_of(components), has_gpu=True)
    assert note.startswith("task.reference=cached: before the first step there is a forward of every pair, about ")
    assert note.endswith(" s for 1,000 of the longest")
    without = reference_note(components, machine_of(components), has_gpu=False)
    assert without == "task.reference=cached: before the first step there is a forward of every pair"


def test_no_note_without_a_reference() -> None:
    components = components_of(*SMALL_MODEL)
    assert reference_note(components, machine_of(components), has_gpu=True) is None


@pytest.mark.parametrize("offload", ["none", "layer_stream"])
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_copy_is_in_the_memory_of_the_plan(offload: str, adapter: str) -> None:
    keys = (*PAIRS, f"offload={offload}", f"adapter={adapter}")
    plain, second = (
        plan_run(components, machine_of(components), has_gpu=True)
        for components in (components_of(*keys, f"task.reference={name}") for name in ("cached", "copy"))
    )
    whole = components_of(*PAIRS, f"offload={offload}").footprint
    device = whole.resident_bytes + whole.slot_bytes
    assert second.device_bytes["reference"] == device > 0
    assert second.totals["vram_budget"] == plain.totals["vram_budget"] + device
    assert second.host_bytes.get("reference", 0) == whole.host_home_bytes
    assert second.pinned_bytes == plain.pinned_bytes + whole.host_home_bytes
    (note,) = (note for note in second.notes if note.startswith("task.reference=copy"))
    assert "begins with a forward of all its pairs by the copy, about " in note
    assert ms_of(note) < second.forecast.step_ms


def test_no_unit_of_a_copy_stays_on_the_device() -> None:
    keys = (*PAIRS, "offload=layer_stream", "offload.resident=1", "task.reference=copy")
    components = components_of(*keys)
    assert components.footprint.units == 1
    assert components.reference.footprint.units == 2
