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
