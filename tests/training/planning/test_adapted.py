"""The linear layers that have no adapter, and what the plan says of them."""

from __future__ import annotations

import pytest

from tests.test_any_model import COMMON, GPT2
from tests.training.helpers.in_process import SMALL_MODEL, components_of
from training.planning.adapted import unadapted_note
from training.planning.machine import machine_of
from training.planning.plan import plan_run

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


@pytest.mark.parametrize("keys", [(), ("adapter=lora", "adapter.modules_to_save=[lm_head]")])
def test_no_note_where_the_model_trains_or_all_have_one(keys: tuple[str, ...]):
    assert unadapted_note(components_of(*SMALL_MODEL, *keys)) is None
