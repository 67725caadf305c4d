"""The share of the weights that streams, and what the plan says of the rest."""

from __future__ import annotations

import pytest

from tests.training.helpers import streamed_shapes
from tests.training.helpers.in_process import SMALL_MODEL, components_of
from training.planning.machine import machine_of
from training.planning.plan import plan_run
from training.planning.streamed import staying_note, streamed_share, unmatched_note

# The embedding and the head are half of such a model.
MODEL = (*SMALL_MODEL, "model.vocab_size=512", "offload=layer_stream")


def test_a_resident_model_streams_nothing():
    components = components_of(*SMALL_MODEL)
    assert streamed_share(components) is None
    assert staying_note(components) is None


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


@pytest.mark.parametrize("asked", ["offload.outside=stream", "offload.resident=1"])
def test_no_note_where_all_streams_or_the_user_keeps_some(asked: str):
    components = components_of(*MODEL, asked)
    assert staying_note(components) is None


@pytest.mark.parametrize("pattern", ["include=[layers.*]", "exclude=['*']"])
def test_patterns_that_leave_nothing_are_named(pattern: str):
    note = staying_note(components_of(*MODEL, f"offload.{pattern}"))
    named = f"offload.{pattern}".replace("[layers.*]", "['layers.*']")
    assert note.startswith("nothing streams: ")
    assert named in note
    assert unmatched_note(components_of(*MODEL, f"offload.{pattern}")) is None


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


@pytest.mark.parametrize(
    "keys",
    [
        ("offload.outside=stream", "offload.exclude=[lm_head]"),
        ("offload=bounce_linear", "offload.include=['*.mlp.*']"),
        ("offload=shard_offload", "offload.exclude=['*.0']"),
        ("offload=tensor_swap", "offload@offload.weights=layer_stream", "offload.weights.exclude=['*.0']"),
    ],
)
def test_patterns_that_match_have_no_note(keys: tuple[str, ...]):
    assert unmatched_note(components_of(*MODEL, *keys)) is None


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
