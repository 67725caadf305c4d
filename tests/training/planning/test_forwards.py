"""The forwards beside the steps in a plan: samples have room, or are refused, and those of a reference have a note."""

from __future__ import annotations

import logging
import re

import pytest

from tests.test_any_model import GPT2, UNET
from tests.training.helpers.in_process import SMALL_MODEL, TINY_RUN, components_of
from training.planning import fit
from training.planning.fit import MisfitError
from training.planning.forwards import reference_note, refuse_text, sample_bytes
from training.planning.machine import machine_of
from training.planning.plan import plan_run

RUN = (*(key for key in TINY_RUN if not key.startswith("model.")), "batch_size=1", "seq_len=64", "sample.every=1")
LLAMA = ("model.hidden_size=64", "model.num_hidden_layers=2", "dataset=stdlib")
# Keys and values of a position: 2 layers of 2 heads of 16 numbers, and of 2 heads of 16.
POSITION_BYTES = {"llama": 2 * 2 * 2 * 16 * 4, "gpt2": 2 * 2 * 2 * 16 * 4}
MODELS = {"llama": LLAMA, "gpt2": (*GPT2, "dataset=stdlib")}


@pytest.mark.parametrize("mode", ["none", "layer_stream"])
@pytest.mark.parametrize("name", MODELS)
def test_a_longer_text_takes_its_keys_and_values_more(name: str, mode: str):
    found = [
        sample_bytes(components_of(*RUN, *MODELS[name], f"offload={mode}", f"sample.tokens={tokens}"), has_gpu=False)
        for tokens in (20, 40)
    ]
    assert found[1] - found[0] >= 20 * POSITION_BYTES[name]
    assert found[0] >= 20 * POSITION_BYTES[name]


def test_no_sample_takes_nothing_and_no_more_than_a_sequence_is_planned():
    assert sample_bytes(components_of(*RUN, *LLAMA, "sample.every=null"), has_gpu=True) == 0
    sizes = {sample_bytes(components_of(*RUN, *LLAMA, f"sample.tokens={count}"), True) for count in (64, 10_000)}
    assert len(sizes) == 1


def test_what_a_sample_takes_beyond_a_step_is_a_part_of_the_plan():
    def planned(count: int) -> dict[str, int]:
        components = components_of(*RUN, *UNET, f"task.sample_count={count}")
        return dict(plan_run(components, machine_of(components), True).device_bytes)

    few, many = planned(1), planned(500)
    assert few.pop("samples") == 0
    # Both predictions of 500 images of 8 x 8 in float32, and more.
    assert many.pop("samples") > 2 * 500 * 64 * 4
    assert few == many


@pytest.mark.parametrize("name", MODELS)
def test_a_text_that_has_no_room_is_refused_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(fit, "free_host_bytes", lambda: 10 * 2**20)
    monkeypatch.setattr(fit, "rss_gib", lambda: 0.0)
    monkeypatch.setattr("training.planning.forwards.rss_gib", lambda: 0.0)
    refuse_text(components_of(*RUN, *MODELS[name]), 100)
    refused = r"^a text of 100,000 tokens does not fit, its .*: host_budget: .*: take fewer --tokens, or"
    with pytest.raises(MisfitError, match=refused):
        refuse_text(components_of(*RUN, *MODELS[name]), 100_000)
    caplog.set_level(logging.WARNING)
    refuse_text(components_of(*RUN, *MODELS[name], "force=true"), 100_000)
    assert "force=true makes it: a text of 100,000 tokens does not fit" in caplog.text


def test_a_budget_holds_a_text_too():
    with pytest.raises(MisfitError, match=r"host_budget: .* 1.00 MiB \(host_budget\) available"):
        refuse_text(components_of(*RUN, *LLAMA, "host_budget=1MiB"), 10)


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
