"""The layers that get an adapter, and the modules that train in full beside them."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from models.adapter_targets import (
    expert_names,
    linear_names,
    matches,
    patterns_of,
    saved_names,
    short_names,
    short_parameter_names,
    target_names,
)
from models.adapters import Lora, inject, root_of
from models.llama import Llama
from tests.models.helpers.hf_models import tiny
from tests.models.helpers.small_diffusion import TIMES, inputs_of, small

ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
MLP = ("down_proj", "gate_proj", "up_proj")


def llama(**sizes: object) -> Llama:
    with torch.device("meta"):
        return Llama(40, 16, 32, 2, 2, 2, **sizes)


def last(names: list[str]) -> tuple[str, ...]:
    return tuple(sorted({name.rpartition(".")[2] for name in names}))


def test_by_default_every_linear_layer_of_the_blocks_and_nothing_around_them():
    names = target_names(llama(), None)
    assert (len(names), last(names)) == (14, tuple(sorted((*ATTENTION, *MLP))))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        # Linear layers that are written as convolutions; a head that is tied.
        ("gpt2", ("c_attn", "c_fc", "c_proj")),
        # Its kernels read the weights of the other projections.
        ("mamba", ("in_proj", "x_proj")),
        # Its experts are one tensor, and peft would take the layers of its dense blocks for them.
        ("deepseek_v3", ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj")),
        ("convnext", ("pwconv1", "pwconv2")),
    ],
)
def test_layers_where_an_adapter_would_have_no_effect_are_left_out(name: str, layers: tuple[str, ...]):
    assert last(target_names(tiny(name, "meta").hf, None)) == layers


def test_attention_of_torch_reads_its_output_projection_itself():
    with torch.device("meta"):
        model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.ModuleList([nn.Linear(8, 8)]))
    assert target_names(model, None) == ["1.0"]
    with pytest.raises(ValueError, match=r"^targets=out_proj: matches no module; the model has 0$"):
        target_names(model, ["out_proj"])


def test_layers_that_are_called_by_keyword_are_left_out():
    """Those of peft take no `input`; the projections of its spatial transformers are called as usual."""
    model = small("unet_motion", use_linear_projection=True)
    names = target_names(root_of(model), None)
    assert {name for name in names if name.endswith("proj_in")} == {
        f"{block}.attentions.0.proj_in" for block in ("down_blocks.0", "up_blocks.1", "mid_block")
    } | {"up_blocks.1.attentions.1.proj_in"}
    inject(model, Lora(2, 4), torch.float32)
    noisy, condition = inputs_of("unet_motion")
    assert model(noisy, TIMES, **condition).shape == noisy.shape


def test_patterns_match_whole_names_and_their_ends():
    assert target_names(llama(), ["q_proj", "model.layers.1.mlp.*"]) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        *(f"model.layers.1.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    ]
    assert matches("model.layers.0.q_proj", "layers.0.q_proj")
    assert not matches("model.sublayers.0", "layers.0")


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["q_proj", "qq"], f"targets=qq: matches no module; the model has {', '.join(sorted((*ATTENTION, *MLP)))}"),
        # It computes the loss, and is no layer with one input and one output.
        (["all-linear"], "targets=all-linear: is written null here"),
        (["lm_head"], "targets=lm_head: matches no module; the model has"),
        (["embed_tokens"], "targets=embed_tokens: matches no module"),
        ([], "targets=[]: give patterns, or null for all linear layers of the blocks; the model has"),
    ],
)
def test_targets_that_do_not_exist_are_refused_with_those_that_do(patterns: list[str], message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        target_names(llama(), patterns)


def test_a_model_without_blocks_needs_patterns():
    model = nn.Sequential(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"^targets=null: the model has no linear layer in a list .* the model has 0$"):
        target_names(model, None)
    assert target_names(model, ["0"]) == ["0"]


def test_modules_that_train_in_full_come_with_those_they_share_a_weight_with():
    assert saved_names(llama(), ["lm_head"], []) == ["lm_head"]
    tied = llama(tie_word_embeddings=True)
    assert sorted(saved_names(tied, ["lm_head"], [])) == ["lm_head", "model.embed_tokens"]
    assert saved_names(llama(), ["layers.0", "layers.0.*"], ["model.layers.1.mlp.up_proj"]) == ["model.layers.0"]


@pytest.mark.parametrize("pattern", ["mlp", "up_proj", "layers.0", "model"])
def test_a_layer_cannot_have_an_adapter_and_train_in_full(pattern: str):
    with pytest.raises(ValueError, match=r"^modules_to_save=.*: model\.layers\.0\.mlp\.up_proj gets an adapter"):
        saved_names(llama(), [pattern], ["model.layers.0.mlp.up_proj"])


def test_names_are_short_where_they_are_no_others():
    names = target_names(llama(), ["q_proj"])
    assert short_names(llama(), names) == ["q_proj"]
    assert short_names(llama(), names[:1]) == ["model.layers.0.self_attn.q_proj"]


class Router(nn.Linear):
    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(rows).topk(1)


class Grouped(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.bmm(rows, self.weight.view(2, self.in_features // 2, -1))


class Scaled(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight.t() * 2.0


def test_layers_that_inherit_from_linear_ones_and_compute_something_else_get_no_adapter():
    with torch.device("meta"):
        blocks = nn.ModuleList([nn.Sequential(Router(4, 2), Grouped(4, 4), Scaled(4, 8), nn.Linear(8, 4))])
        model = nn.ModuleDict({"blocks": blocks})
    assert target_names(model, None) == ["blocks.0.2", "blocks.0.3"]
    with pytest.raises(ValueError, match=r"^targets=blocks.0.0: matches no module"):
        target_names(model, ["blocks.0.0"])


@pytest.mark.parametrize("model_type", ["jamba", "falcon_mamba"])
def test_layers_whose_weights_are_read_alone_get_no_adapter(model_type: str):
    mixer = nn.ModuleDict({"dt_proj": nn.Linear(2, 2), "out_proj": nn.Linear(2, 2), "x_proj": nn.Linear(2, 2)})
    model = nn.ModuleDict({"layers": nn.ModuleList([mixer])})
    model.config = SimpleNamespace(model_type=model_type)
    called = ["out_proj", "x_proj"] if model_type == "jamba" else ["x_proj"]
    assert target_names(model, None) == [f"layers.0.{name}" for name in called]


def test_what_multiplies_with_a_matrix_has_its_kind():
    root = tiny("gpt_oss", "meta").hf
    kinds = linear_names(root)
    block = {name.rpartition(".")[2]: kind for name, kind in kinds.items() if name.startswith("model.layers.1.")}
    layers = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "layer")
    assert block == {**layers, "router": "router", "experts": "experts"}
    assert list(kinds)[-1] == "lm_head"
    names = expert_names(root)
    # Their biases, [experts, out], are none.
    ends = ["gate_up_proj", "down_proj"] * 2
    assert [name.rpartition(".")[2] for name in names] == ends
    assert short_parameter_names(root, names) == ["experts.down_proj", "experts.gate_up_proj"]
    assert short_parameter_names(root, names[:1]) == names[:1]


@pytest.mark.parametrize(
    ("targets", "patterns"),
    [
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        (["layers.*.mlp.*"], ["gate_proj", "up_proj", "down_proj"]),
        (["layers.1.*.q_proj"], ["model.layers.1.self_attn.q_proj"]),
    ],
)
def test_patterns_stand_for_exactly_the_layers_that_they_are_made_of(targets: list[str], patterns: list[str]):
    root = tiny("llama", "meta").hf
    names = target_names(root, targets)
    assert patterns_of(root, names) == patterns
    assert target_names(root, patterns) == names
