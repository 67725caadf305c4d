"""The plan has room for samples: keys and values of a text, a batch of images. A text without room is refused."""

from __future__ import annotations

import logging

import pytest

from tests.test_any_model import GPT2, UNET
from tests.training.helpers.in_process import TINY_RUN, components_of
from training.planning import fit
from training.planning.fit import MisfitError
from training.planning.machine import machine_of
from training.planning.plan import plan_run
from training.planning.samples import refuse_text, sample_bytes

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
    monkeypatch.setattr("training.planning.samples.rss_gib", lambda: 0.0)
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
