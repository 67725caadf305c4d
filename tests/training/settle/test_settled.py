"""Each value that nobody gave has a line in the plan that says why."""

import pytest

from tests.training.helpers.in_process import components_of
from training.errors import UserError
from training.planning.plan import resident_chosen
from training.settle.components import reasons_of

BYTES = "dataset.tokenizer=null"


def test_a_model_option_brings_its_own_values_but_not_those_that_were_given():
    lines = reasons_of(components_of("model=llama1b", "schedule=constant", "optimizer.lr=1e-3"))
    assert lines["model=llama1b"] == "brings batch_size=32"
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
    of_size = {"adapter", "optimizer.lr", "optimizer.weight_decay", "schedule.warmup"}
    assert lines.keys() == {"optimizer.gradients", "optimizer.device_share", "optimizer.speculate"} | of_size
    assert "is frozen, and gradients are final when they land only in units" in lines["optimizer.gradients"]


EARLY = ("offload=layer_stream", "clip_norm=null", "microbatches=1")


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("offload", ["layer_stream", "bounce_linear", "shard_offload", "layer_stream_swap"])
def test_auto_releases_what_only_updates_need(offload: str, devices: int):
    components = components_of(*EARLY, f"offload={offload}", f"devices={devices}")
    assert components.gradients.released
    assert components.options.release_gradients
    assert components.gradients.why == "updates begin inside backward, and nothing else needs them"


def test_microbatches_that_are_added_up_on_the_device_release_too():
    assert components_of(*EARLY, "offload=shard_offload", "microbatches=2").gradients.released


NEEDED = {
    "clip_norm=0.5": "clip_norm=0.5 needs them until their norm is known: to release them take clip_norm=null",
    "on_nonfinite=skip": "on_nonfinite=skip needs to know first that all are finite: take on_nonfinite=stop",
    "microbatches=2": "those of microbatches=2 are added up in host memory: take microbatches=1, or",
    "devices=2 parallel.homes=own": "devices=2 sum them after backward: take devices=1",
}


@pytest.mark.parametrize("override", NEEDED)
def test_what_needs_gradients_keeps_them_and_refuses_their_release(override: str):
    overrides = override.split()
    components = components_of(*EARLY, *overrides)
    assert not components.gradients.released
    assert not components.options.release_gradients
    assert components.gradients.why.startswith(NEEDED[override])
    with pytest.raises(
        UserError, match=r"^optimizer\.gradients=release: .*; or take optimizer\.gradients=keep$"
    ) as found:
        components_of(*EARLY, *overrides, "optimizer.gradients=release")
    assert NEEDED[override] in str(found.value)


def test_who_chooses_is_not_told_why():
    for asked in ("keep", "release"):
        choice = components_of(*EARLY, f"optimizer.gradients={asked}").gradients
        assert (choice.released, choice.why) == (asked == "release", None)


def test_without_gradients_on_the_host_there_is_no_choice():
    for overrides in (("offload=none",), ("offload=layer_stream", "adapter=lora"), ("optimizer=adamw",)):
        choice = components_of(*EARLY, *overrides).gradients
        assert (choice.released, choice.why) == (False, None)
    with pytest.raises(UserError, match="gradients=release: no weights stream"):
        components_of(*EARLY, "offload=none", "optimizer=host_adamw", "optimizer.gradients=release")


def test_a_value_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match=r"optimizer\.gradients=drop: must be auto, keep or release"):
        components_of(*EARLY, "optimizer.gradients=drop")


def test_what_transformers_takes_for_experts_is_named_unless_it_is_given():
    key = "model.overrides.experts_implementation"
    assert reasons_of(components_of("model=mixtral_small"))[key] == "grouped_mm, because transformers takes it"
    given = components_of("model=mixtral_small", "model.overrides={experts_implementation:eager}")
    assert key not in reasons_of(given)
    assert given.model.experts_implementation == "eager"
