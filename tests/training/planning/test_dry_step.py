"""The dry run of a step, of which many microbatches follow from a few; models and data of other sizes are refused."""

import logging
import re

import pytest
import torch

from offload.planning import DryRun
from tests.test_any_model import GPT2, UNET
from tests.training.helpers.in_process import SMALL_MODEL, TINY_RUN, components_of
from training.errors import UserError
from training.planning import dry_step as module
from training.planning import fit
from training.planning.dry_step import (
    dry_step,
    examples_of_rank,
    reference_note,
    refuse_shapes,
    sample_bytes,
    without_dry_run,
)
from training.planning.fit import MisfitError, refuse_text
from training.planning.machine import machine_of
from training.planning.plan import plan_run


def bytes_of(step: DryRun) -> list[int]:
    return [sum(getattr(phase, name) for phase in step.phases) for name in ("h2d_bytes", "d2h_bytes", "flops")]


@pytest.mark.parametrize("mode", ["layer_stream", "shard_offload"])
def test_many_microbatches_follow_from_those_that_ran(mode: str, monkeypatch: pytest.MonkeyPatch):
    components = components_of(f"offload={mode}", "batch_size=7", "microbatches=5", "seq_len=16")
    derived = dry_step(components, has_gpu=True)
    monkeypatch.setattr(module, "MOST_DRY", 5)
    # At the turn from one microbatch to the next a unit or two are still there.
    assert bytes_of(derived) == pytest.approx(bytes_of(dry_step(components, has_gpu=True)), rel=0.02)


@pytest.mark.parametrize(
    ("boundary", "count"),
    [
        ("host", 8),
        ("device", 3),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("host", 3), ("device", 8))),
    ],
)
def test_the_peak_of_many_microbatches_is_bounded_by_that_of_two(
    boundary: str, count: int, monkeypatch: pytest.MonkeyPatch
):
    size = ("model.hidden_size=64", "model.intermediate_size=128", "model.num_hidden_layers=4", "seq_len=64")
    run = ("offload=shard_offload", f"offload.boundary={boundary}", f"batch_size={count}", f"microbatches={count}")
    components = components_of(*run, *size)
    derived = dry_step(components, has_gpu=True).peak_bytes
    monkeypatch.setattr(module, "MOST_DRY", count)
    exact = dry_step(components, has_gpu=True).peak_bytes
    # Beside the tensors of a microbatch it has numbers of a few bytes.
    assert 0.998 * exact <= derived <= 1.2 * exact


def test_no_rank_computes_more_examples_than_the_first():
    components = components_of("batch_size=7", "microbatches=1")
    assert examples_of_rank(components.config) == 7
    components.config.devices = 2
    assert examples_of_rank(components.config) == 4


def test_without_a_dry_run_the_footprint_bounds_the_copies():
    components = components_of("offload=layer_stream", "microbatches=1")
    assert bytes_of(without_dry_run(components))[0] >= components.footprint.host_weight_bytes


def test_a_knob_of_the_task_is_refused_and_is_no_note_that_the_model_needs_values():
    components = components_of("model=unet_small", "task.null_class=null")
    with pytest.raises(UserError, match=r"^task\.null_class=None: the dataset has labels: give the "):
        dry_step(components, has_gpu=True)


RUN = tuple(key for key in TINY_RUN if not key.startswith("model."))
VIT = (
    "model=hf",
    "model.source=vit",
    "model.task=classification",
    "model.overrides={num_hidden_layers: 1, hidden_size: 16, num_attention_heads: 2, intermediate_size: 16,"
    " image_size: 16, patch_size: 8, num_labels: 3}",
    "task=classification",
    "dataset=synthetic_images",
    "dataset.num_classes=3",
)
TEXT_UNET = (
    "model=diffusers",
    "model.source=UNet2DConditionModel",
    "model.overrides={sample_size: 8, block_out_channels: [8, 16], down_block_types: [CrossAttnDownBlock2D,"
    " DownBlock2D], up_block_types: [UpBlock2D, CrossAttnUpBlock2D], norm_num_groups: 4, layers_per_block: 1,"
    " cross_attention_dim: 12, attention_head_dim: 4}",
    "task=flow_matching",
    "dataset=synthetic_images",
    "dataset.shape=[4,8,8]",
)
SMALL = "vocab_size: 64, num_hidden_layers: 2, hidden_size: 32, intermediate_size: 48, num_attention_heads: 4"
EXPERTS = f"{SMALL}, num_key_value_heads: 4, n_routed_experts: 4, moe_intermediate_size: 16, first_k_dense_replace: 1"
GROUPS = "vocab_size: 64, num_hidden_layers: 2, hidden_size: 32, num_heads: 8, head_dim: 8, n_groups: 3"
UNET_OF_IMAGES = (*UNET[:7], "dataset=synthetic_images", "dataset.num_classes=3")


def of_library(source: str, overrides: str) -> tuple[str, ...]:
    return "model=hf", f"model.source={source}", f"model.overrides={{{overrides}}}"


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param((*TEXT_UNET, "dataset.condition={encoder_hidden_states: [3, 13]}"), id="width of a text"),
        pytest.param((*VIT, "dataset.shape=[1,16,16]"), id="channels"),
        pytest.param((*VIT, "dataset.shape=[3,32,32]"), id="pixels"),
        pytest.param((*UNET_OF_IMAGES, "dataset.shape=[3,8,8]"), id="channels of a UNet"),
        # Keys of an architecture that contradict each other, of which its configuration class says nothing.
        pytest.param(of_library("deepseek_v3", EXPERTS), id="fewer experts than groups"),
        pytest.param(of_library("deepseek_v2", EXPERTS), id="no number of experts to choose"),
        pytest.param(of_library("qwen3", f"{SMALL}, num_key_value_heads: 3"), id="heads that the keys do not divide"),
        pytest.param(of_library("mamba2", GROUPS), id="groups that do not divide the heads"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(keys: tuple[str, ...]):
    components = components_of(*RUN, *keys)
    with pytest.raises(UserError, match=r"^model=\w+ with dataset=\w+: sizes do not fit each other \(.+\): "):
        plan_run(components, machine_of(components), True)


def test_the_examples_are_those_of_a_microbatch(monkeypatch: pytest.MonkeyPatch):
    components = components_of(*RUN, *VIT, "dataset.shape=[3,16,16]", "batch_size=7", "microbatches=2")
    seen = []

    def fails(*given: torch.Tensor, **named: torch.Tensor) -> None:
        seen.extend(len(tensor) for tensor in (*given[1:], *named.values()) if isinstance(tensor, torch.Tensor))
        raise RuntimeError("no room")

    monkeypatch.setattr(type(components.model), "forward", fails)
    refuse_shapes(components)
    assert set(seen) == {4}


def test_fitting_sizes_and_models_that_need_values_are_not(monkeypatch: pytest.MonkeyPatch):
    components = components_of(*RUN, *VIT, "dataset.shape=[3,16,16]")
    refuse_shapes(components)
    for message in ("Tensor.item() cannot be called on meta tensors", "the sizes of meta tensors", "no room"):
        with monkeypatch.context() as patch:

            def fails(*_: object, message: str = message) -> None:
                raise RuntimeError(message)

            patch.setattr(type(components.model), "forward", fails)
            refuse_shapes(components)


@pytest.mark.parametrize("shape", [[3, 8, 8], [1, 7, 7]])
def test_samples_of_a_shape_that_the_model_does_not_take_are_refused(shape: list[int]):
    given = f"task.sample_shape=[{','.join(map(str, shape))}]"
    components = components_of(*RUN, *UNET, "sample.every=1", given)
    with pytest.raises(UserError, match=rf"^task\.sample_shape=\[{shape[0]}, .*\]: the model takes no images of this"):
        plan_run(components, machine_of(components), True)


def test_samples_of_another_shape_that_the_model_takes_are_planned():
    components = components_of(*RUN, *UNET, "sample.every=1", "task.sample_shape=[1,16,16]")
    plan_run(components, machine_of(components), True)


SAMPLED = (*(key for key in TINY_RUN if not key.startswith("model.")), "batch_size=1", "seq_len=64", "sample.every=1")
LLAMA = ("model.hidden_size=64", "model.num_hidden_layers=2", "dataset=stdlib")
# Keys and values of a position: 2 layers of 2 heads of 16 numbers, and of 2 heads of 16.
POSITION_BYTES = {"llama": 2 * 2 * 2 * 16 * 4, "gpt2": 2 * 2 * 2 * 16 * 4}
MODELS = {"llama": LLAMA, "gpt2": (*GPT2, "dataset=stdlib")}


@pytest.mark.parametrize("mode", ["none", "layer_stream"])
@pytest.mark.parametrize("name", MODELS)
def test_a_longer_text_takes_its_keys_and_values_more(name: str, mode: str):
    found = [
        sample_bytes(
            components_of(*SAMPLED, *MODELS[name], f"offload={mode}", f"sample.tokens={tokens}"), has_gpu=False
        )
        for tokens in (20, 40)
    ]
    assert found[1] - found[0] >= 20 * POSITION_BYTES[name]
    assert found[0] >= 20 * POSITION_BYTES[name]


def test_no_sample_takes_nothing_and_no_more_than_a_sequence_is_planned():
    assert sample_bytes(components_of(*SAMPLED, *LLAMA, "sample.every=null"), has_gpu=True) == 0
    sizes = {sample_bytes(components_of(*SAMPLED, *LLAMA, f"sample.tokens={count}"), True) for count in (64, 10_000)}
    assert len(sizes) == 1


def test_what_a_sample_takes_beyond_a_step_is_a_part_of_the_plan():
    def planned(count: int) -> dict[str, int]:
        components = components_of(*SAMPLED, *UNET, f"task.sample_count={count}")
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
    refuse_text(components_of(*SAMPLED, *MODELS[name]), 100)
    refused = r"^a text of 100,000 tokens does not fit, its .*: host_budget: .*: take fewer --tokens, or"
    with pytest.raises(MisfitError, match=refused):
        refuse_text(components_of(*SAMPLED, *MODELS[name]), 100_000)
    caplog.set_level(logging.WARNING)
    refuse_text(components_of(*SAMPLED, *MODELS[name], "force=true"), 100_000)
    assert "force=true makes it: a text of 100,000 tokens does not fit" in caplog.text


def test_a_budget_holds_a_text_too():
    with pytest.raises(MisfitError, match=r"host_budget: .* 1.00 MiB \(host_budget\) available"):
        refuse_text(components_of(*SAMPLED, *LLAMA, "host_budget=1MiB"), 10)


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
