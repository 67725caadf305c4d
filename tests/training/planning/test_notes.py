"""A plan names weights that do not stream, or have no adapter."""

from dataclasses import replace

import pytest

from models.quantise import QuantisedWeight
from tests.test_any_model import COMMON, GPT2
from tests.training.helpers import streamed_shapes
from tests.training.helpers.in_process import SMALL_MODEL, components_of
from training.planning.dry_step import dry_step
from training.planning.machine import OPERATIONS_SHARE, machine_of
from training.planning.notes import (
    experts_note,
    positions_note,
    staying_note,
    streamed_share,
    unadapted_note,
    unmatched_note,
)
from training.planning.plan import plan_run

# The embedding and the head are half of such a model.
MODEL = (*SMALL_MODEL, "model.vocab_size=512", "offload=layer_stream")


@pytest.mark.parametrize(
    ("note", "keys"),
    [
        (staying_note, SMALL_MODEL),
        (staying_note, (*MODEL, "offload.outside=stream")),
        (staying_note, (*MODEL, "offload.resident=1")),
        (unmatched_note, (*MODEL, "offload.outside=stream", "offload.exclude=[lm_head]")),
        (unmatched_note, (*MODEL, "offload=bounce_linear", "offload.include=['*.mlp.*']")),
        (unmatched_note, (*MODEL, "offload=shard_offload", "offload.exclude=['*.0']")),
        (
            unmatched_note,
            (*MODEL, "offload=tensor_swap", "offload@offload.weights=layer_stream", "offload.weights.exclude=['*.0']"),
        ),
        (unadapted_note, SMALL_MODEL),
        (unadapted_note, (*SMALL_MODEL, "adapter=lora", "adapter.modules_to_save=[lm_head]")),
    ],
)
def test_there_is_no_note_where_nothing_is_left_out_or_the_user_chose(note, keys: tuple[str, ...]):
    assert note(components_of(*keys)) is None


def test_what_stays_is_named_with_the_key_that_streams_it():
    components = components_of(*MODEL)
    total = sum(parameter.nbytes for parameter in components.model.parameters())
    blocks = sum(parameter.nbytes for parameter in components.model.model.layers.parameters())
    assert streamed_share(components) == pytest.approx(blocks / total, rel=0.01)  # units are padded
    note = staying_note(components)
    assert note == (
        "64% of the weights stay on the device: model.embed_tokens.weight (0.06 MiB), lm_head.weight (0.06 MiB);"
        " offload.outside=stream streams them too"
    )
    plan = plan_run(components, machine_of(components), has_gpu=True)
    assert note in plan.notes
    assert plan.rows()["weights that stream"] == "36%"


def test_patterns_that_leave_nothing_are_named():
    """Such an `include` is refused: tests/offload/modes/test_weight_mode.py."""
    components = components_of(*MODEL, "offload.exclude=['*']")
    note = staying_note(components)
    assert note.startswith("nothing streams: ")
    assert "offload.exclude=['*']" in note
    assert unmatched_note(components) is None


def test_patterns_that_match_nothing_beside_others_are_named():
    """One that matches a module inside a block selects nothing either: blocks stream as a whole."""
    components = components_of(
        *MODEL,
        "offload.include=['model.layers.*','model.layers.1.mlp','layer.*']",
        "offload.exclude=['model.layers.0','lm_head']",
    )
    note = unmatched_note(components)
    assert note == (
        "without effect: offload.include=model.layers.1.mlp, offload.include=layer.*, offload.exclude=lm_head; the"
        " modules that the mode cuts out are model.layers.0, model.layers.1"
    )
    assert note in plan_run(components, machine_of(components), has_gpu=True).notes


@pytest.mark.parametrize("name", streamed_shapes.SHAPES)
@pytest.mark.slow
def test_every_mode_streams_models_of_all_kinds(name: str):
    """Blocks are found in all lists: encoder and decoder, down, mid and up, double and single."""
    model = streamed_shapes.built(name)
    for mode in streamed_shapes.MODES:
        assert streamed_shapes.share(model, mode, "stream") > 0.99, mode
        # By default what stays is embedding tables and the head of a language model.
        assert streamed_shapes.share(model, mode, "resident") > 0.95 - streamed_shapes.share_of_tables(model), mode


def test_adapters_that_stay_by_choice_are_not_named():
    components = components_of(*MODEL, "adapter=lora", "adapter.rank=32")
    note = staying_note(components)
    assert "model.embed_tokens.weight (0.06 MiB), lm_head.weight (0.06 MiB)" in note
    assert "lora" not in note


@pytest.mark.parametrize("offload", ["none", "layer_stream"])
@pytest.mark.slow
def test_a_plan_counts_the_time_to_dequantise(offload: str):
    keys = (*SMALL_MODEL, "model.vocab_size=512", "precision=bf16", f"offload={offload}", "hardware=h200")
    # Bytes read and written for a number.
    formats = {"int8": 1 + 4 + 4 + 2, "nf4": 0.5 + 2}
    components = {name: components_of(*keys, f"quantize={name}") for name in formats}
    steps = {name: dry_step(each, has_gpu=True) for name, each in components.items()}
    parameters = components["int8"].model.parameters()
    numbers = sum(each.numel() for each in parameters if isinstance(each, QuantisedWeight))
    more = (formats["int8"] - formats["nf4"]) * numbers
    for int8, nf4 in zip(steps["int8"].phases, steps["nf4"].phases, strict=True):
        # Besides, a scale is read for each row.
        assert int8.memory_bytes - nf4.memory_bytes == pytest.approx(more, rel=0.05)
    machine = machine_of(components["int8"])
    slow, fast = (
        plan_run(components["int8"], replace(machine, device_gb_s=rate), has_gpu=True).forecast.alone_ms["compute"]
        for rate in (1.0, 2.0)
    )
    expected_ms = sum(phase.memory_bytes for phase in steps["int8"].phases) / OPERATIONS_SHARE / 1e6
    assert slow - fast == pytest.approx(expected_ms / 2, rel=0.05)


SIZES = "hidden_size:16,intermediate_size:32,num_hidden_layers:2,num_attention_heads:4,num_key_value_heads:2"
EXPERTS = "num_local_experts:4,num_experts_per_tok:2,vocab_size:512,max_position_embeddings:64"
MIXTRAL = (*COMMON, "model=hf", "model.source=mixtral", f"model.overrides={{{SIZES},{EXPERTS}}}")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((*SMALL_MODEL, "adapter=lora"), "no adapter: lm_head"),
        (
            (*SMALL_MODEL, "adapter=lora", "adapter.targets=[q_proj,layers.0.mlp.*]"),
            "no adapter: k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head",
        ),
        ((*COMMON, *GPT2, "adapter=dora", "adapter.targets=[c_attn]"), "no adapter: c_proj, c_fc, lm_head"),
        (
            (*MIXTRAL, "adapter=lora"),
            "no adapter: router gate, experts (adapter.experts=true gives them one), lm_head",
        ),
        ((*MIXTRAL, "adapter=lora", "adapter.experts=true"), "no adapter: router gate, lm_head"),
    ],
)
def test_they_are_named_once(keys: tuple[str, ...], expected: str):
    components = components_of(*keys)
    names = [name for name, _ in components.model.named_parameters()]
    assert unadapted_note(components) == expected
    assert expected in plan_run(components, machine_of(components), has_gpu=True).notes
    assert [name for name, _ in components.model.named_parameters()] == names


JETMOE = ("model=hf", "model.source=jetmoe", "model.overrides={num_hidden_layers: 1}", "dataset=synthetic")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (("model=mixtral_small",), "none, which TRL adds"),
        (("model=mixtral_small", "model.overrides={output_router_logits:true}"), None),
        # Its weight has another name.
        (JETMOE, "none, which TRL adds"),
    ],
)
def test_the_auxiliary_loss_that_trl_adds_is_named(keys: tuple[str, ...], expected: str | None):
    note = experts_note(components_of("hardware=h200", *keys))
    assert (expected in note) if expected else note is None
    assert experts_note(components_of(*SMALL_MODEL)) is None
    without = ("model=hf", "model.source=llama4_text", "model.overrides={num_hidden_layers: 1}")
    assert experts_note(components_of(*without, "hardware=h200", "dataset=synthetic")) is None


LONG = ("dataset=synthetic", "batch_size=1", "seq_len=8192", "hardware=h200", "model=hf", "recompute=block")


def long(source: str, *more: str, values: str = "") -> tuple[str, ...]:
    return (*LONG, f"model.source={source}", f"model.overrides={{{SIZES},head_dim:8,vocab_size:512{values}}}", *more)


SQUARES = "masks and scores of all pairs of tokens take {} of the activations, and four times that at twice the length"


@pytest.mark.parametrize(
    ("keys", "size", "why"),
    [
        # As booleans, and of one layer at a time as numbers.
        (
            long("mistral", "precision=fp32", values=",sliding_window:512"), "0.31 GiB",
            "masks of sliding_window=512 of mistral; precision=bf16 on a GPU needs no masks",
        ),
        (long("mistral", "precision=bf16", values=",sliding_window:512"), None, None),
        (long("mistral", "precision=fp32", values=",sliding_window:8193"), None, None),
        pytest.param(long("qwen3"), None, None, marks=pytest.mark.slow),
        # The mask as numbers, 0.25 GiB, and some of what makes of scores, 1 GiB, a softmax; gemma2 caps them first.
        pytest.param(long("gemma2"), "3.50 GiB", "gemma2 has eager attention by default", marks=pytest.mark.slow),
        pytest.param(
            long("qwen3", "model.attention=eager"), "2.25 GiB", "model.attention=eager: auto may need none",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda each: each[6] if isinstance(each, tuple) else None,
)  # fmt: skip
def test_masks_and_scores_of_long_sequences_are_named(keys: tuple[str, ...], size: str | None, why: str | None):
    components = components_of(*keys)
    plan = plan_run(components, machine_of(components), has_gpu=True)
    found = [note for note in plan.notes if note.startswith("masks")]
    assert found == ([] if size is None else [f"{SQUARES.format(size)}: {why}"])
    assert bool(plan.as_dict()["square_bytes"]) == bool(size)


@pytest.mark.parametrize(("tokens", "expected"), [(64, False), (65, True)])
def test_a_row_that_is_longer_than_its_model_was_made_for_is_named(tokens: int, expected: bool):
    keys = long("qwen3", values=",max_position_embeddings:64")
    components = components_of(*keys, f"seq_len={tokens}")
    note = f"seq_len={tokens} is beyond the max_position_embeddings=64 of qwen3"
    assert positions_note(components) == (note if expected else None)
    assert (note in plan_run(components, machine_of(components), has_gpu=True).notes) == expected
