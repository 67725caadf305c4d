"""Each value that nobody gave has a line in the plan that says why."""

from __future__ import annotations

from tests.training.helpers.in_process import components_of
from training.planning.choices import resident_chosen
from training.settle.components import reasons_of

BYTES = "dataset.tokenizer=null"


def test_a_model_option_brings_its_own_values_but_not_those_that_were_given():
    lines = reasons_of(components_of("model=llama1b", "schedule=constant", "optimizer.lr=1e-3"))
    assert lines["model=llama1b"] == "brings recompute=block, seq_len=2048, batch_size=32, schedule.warmup=10"
    assert lines["precision"] == "fp32, because there is no GPU that computes in bf16"
    assert lines["microbatches"] == "2, of 32,768 tokens"
    assert "optimizer" not in lines


def test_what_follows_the_offload_mode_is_explained():
    components = components_of("offload=layer_stream", "offload.resident=2", "vram_budget=1GiB", "precision=bf16")
    lines = reasons_of(resident_chosen(components, components.config, "offload.resident", 2))
    assert lines["optimizer"] == "host_adamw, because offload=layer_stream keeps weights on the host"
    assert lines["offload.resident"] == "2 of 4 units: fills vram_budget=1GiB"
    assert lines["optimizer.device_share"] == "what the first step leaves free: fills vram_budget=1GiB"
    assert "precision" not in lines
    lines = reasons_of(components_of("offload=layer_stream", "optimizer=host_adamw", "microbatches=1", BYTES))
    assert lines.keys() == {"precision", "optimizer.gradients", "optimizer.device_share", "optimizer.speculate"}
    assert lines["optimizer.gradients"].startswith("keep: clip_norm=1 needs them until their norm is known")
    assert lines["optimizer.device_share"] == "nothing: there is no vram_budget to fill"


def test_a_run_without_choices_has_no_lines():
    assert reasons_of(components_of("precision=fp32", "microbatches=2", BYTES)) == {}


def test_what_follows_an_adapter_is_explained():
    lines = reasons_of(components_of("offload=layer_stream_swap", "adapter=lora", "precision=fp32"))
    assert lines["offload.weights.trained"] == "device, because adapter=lora is small: only frozen weights stream"
    assert lines["optimizer"] == "adamw, because adapter=lora trains on the device"
    given = ("offload.trained=stream", "optimizer=host_adamw", "microbatches=1", "precision=fp32")
    lines = reasons_of(components_of("offload=layer_stream", "adapter=lora", *given, BYTES))
    assert lines.keys() == {"optimizer.gradients", "optimizer.device_share", "optimizer.speculate"}
    assert "is frozen, and gradients are final when they land only in units" in lines["optimizer.gradients"]
