"""Adapters in peft's files: read by peft and by diffusers with equal outputs, and read again here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from peft import PeftModel
from safetensors import safe_open
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from models.adapter_files import (
    CONFIG_FILE,
    DIFFUSERS_FILE,
    WEIGHTS_FILE,
    adapter_tensors,
    check_folder,
    load_adapter,
)
from models.adapters import Dora, Lora, RsLora, inject, merge_adapter, root_of, without_adapters
from models.diffusion import build_diffusion
from models.llama import Llama
from tests.models.helpers.adapted import disturb, with_memory
from tests.models.helpers.hf_models import tiny
from tests.models.helpers.saving import save_adapter
from tests.models.helpers.unets import UNET

KINDS = (Lora, Dora, RsLora)
IDS = torch.arange(12).view(2, 6)
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
CONDITIONED_UNET = UNET | {
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 8,
    "attention_head_dim": 2,
}


def filled(model: nn.Module, adapter: Lora, seed: int = 0) -> nn.Module:
    """The model with an adapter whose values are those after some training."""
    inject(model, adapter, torch.float32)
    return disturb(with_memory(model, seed), seed).eval()


def llama(adapter: Lora, seed: int = 0) -> Llama:
    with torch.device("meta"):
        model = Llama(**SIZES, **HEADS)
    return filled(model, adapter, seed)


def base_of(model: nn.Module, twin: nn.Module) -> nn.Module:
    """Gives `twin`, a plain model of a library, the base's weights."""
    with without_adapters(model):
        twin.load_state_dict(root_of(model).state_dict())
    return twin.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_peft_reads_the_adapter_of_our_model(tmp_path: Path, kind: type[Lora]):
    model = llama(kind(4, 8, 0.5, ["q_proj", "layers.1.mlp.*"], ["lm_head", "model.norm"]))
    save_adapter(model, tmp_path, "some/base")
    base = base_of(model, LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, rms_norm_eps=1e-5)))
    plain = base(IDS).logits
    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    assert loaded.peft_config["default"].base_model_name_or_path == "some/base"
    # The two models add in another order.
    torch.testing.assert_close(loaded(IDS).logits, model(IDS))
    # The logits are about 1, and differ by what two steps have changed.
    assert not torch.allclose(plain, model(IDS), atol=1e-4)
    assert [file.name for file in sorted(tmp_path.iterdir())] == [CONFIG_FILE, WEIGHTS_FILE]


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_tied", "mixtral"])
@pytest.mark.parametrize("kind", KINDS)
def test_peft_reads_the_adapter_of_a_model_of_transformers(tmp_path: Path, name: str, kind: type[Lora]):
    saved = ["embed_tokens"] if name == "qwen3_tied" else None
    model = filled(tiny(name, "meta"), kind(4, 8, modules_to_save=saved))
    save_adapter(model, tmp_path)
    loaded = PeftModel.from_pretrained(base_of(model, type(model.hf)(model.hf.config)), tmp_path).eval()
    logits = model.hf(IDS).logits
    assert torch.equal(loaded(IDS).logits, logits)
    torch.testing.assert_close(loaded.merge_and_unload()(IDS).logits, logits, rtol=1e-5, atol=1e-6)
    merge_adapter(model)
    torch.testing.assert_close(model.hf(IDS).logits, logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_diffusers_reads_the_adapter_of_its_models(tmp_path: Path, kind: type[Lora]):
    with torch.device("meta"):
        model = build_diffusion("UNet2DConditionModel", CONDITIONED_UNET)
    filled(model, kind(4, 8, targets=["to_q", "to_v", "conv1"]))
    save_adapter(model, tmp_path)
    network = base_of(model, type(model.network).from_config(model.network.config))
    images, text = torch.ones(2, 4, 8, 8), torch.ones(2, 3, 8)
    plain = network(images, 3, text).sample
    if kind is Lora:
        network.load_lora_adapter(tmp_path, prefix="unet", weight_name=DIFFUSERS_FILE)
    else:
        parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
        pipeline = StableDiffusionPipeline(
            **parts, unet=network, scheduler=DDIMScheduler(), requires_safety_checker=False
        )
        pipeline.load_lora_weights(tmp_path)
    assert torch.equal(network(images, 3, text).sample, model.network(images, 3, text).sample)
    assert not torch.equal(network(images, 3, text).sample, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_is_loaded_again(tmp_path: Path, kind: type[Lora]):
    adapter = kind(4, 8, modules_to_save=["lm_head"])
    model, other = llama(adapter), llama(adapter, seed=1)
    save_adapter(model, tmp_path)
    assert not torch.equal(model(IDS), other(IDS))
    load_adapter(other, tmp_path)
    assert torch.equal(model(IDS), other(IDS))


def test_what_peft_saves_is_loaded(tmp_path: Path):
    model, other = llama(Dora(4, 8)), llama(Dora(4, 8), seed=1)
    save_adapter(model, tmp_path / "ours")
    base = base_of(model, LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)))
    PeftModel.from_pretrained(base, tmp_path / "ours").save_pretrained(tmp_path / "pefts")
    load_adapter(other, tmp_path / "pefts")
    assert torch.equal(model(IDS), other(IDS))
    with (
        safe_open(tmp_path / "pefts" / WEIGHTS_FILE, "pt") as pefts,
        safe_open(tmp_path / "ours" / WEIGHTS_FILE, "pt") as ours,
    ):
        assert set(pefts.keys()) == set(ours.keys()) == set(adapter_tensors(model))


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (Lora(2, 8), r"has r=4, and this adapter 2: give the same rank$"),
        (Lora(4, 4), r"has lora_alpha=8, and this adapter 4: give the same alpha$"),
        (Dora(4, 8), r"has use_dora=False, and this adapter True: give the same dora$"),
        (RsLora(4, 8), r"has use_rslora=False, and this adapter True: give the same rslora$"),
        (Lora(4, 8, targets=["q_proj"]), r"has tensor base_model.* \(and \d+ more\), which this adapter lacks"),
        (Lora(4, 8, modules_to_save=["lm_head"]), r"lacks tensor base_model\.model\.lm_head\.weight, which"),
    ],
)
def test_another_adapter_is_refused_and_nothing_changed(tmp_path: Path, adapter: Lora, message: str):
    save_adapter(llama(Lora(4, 8)), tmp_path)
    model = llama(adapter)
    before = model(IDS)
    with pytest.raises(ValueError, match=message) as refusal:
        load_adapter(model, tmp_path)
    assert "\n" not in str(refusal.value)
    assert torch.equal(model(IDS), before)
    with pytest.raises(ValueError, match=message):
        check_folder(model.to("meta"), tmp_path)


def test_settings_of_peft_that_cannot_be_had_are_refused(tmp_path: Path):
    save_adapter(llama(Lora(4, 8)), tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | {"alpha_pattern": {"q_proj": 16}}))
    with pytest.raises(ValueError, match=r"has alpha_pattern=\{'q_proj': 16\}, which cannot be loaded here$"):
        load_adapter(llama(Lora(4, 8)), tmp_path)


def test_a_folder_without_an_adapter_or_its_weights_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot be read .*: give a folder that peft has saved"):
        check_folder(llama(Lora(4, 8)), tmp_path)
    save_adapter(llama(Lora(4, 8)), tmp_path)
    check_folder(llama(Lora(4, 8)), tmp_path)
    (tmp_path / WEIGHTS_FILE).unlink()
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is missing"):
        check_folder(llama(Lora(4, 8)), tmp_path)
