"""Adapters in peft's files: read by peft with equal outputs, and read again here."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, PeftModelForCausalLM
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from models.adapter_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_parameters,
    adapter_tensors,
    adapter_values,
    check_adapter,
    load_adapter,
)
from models.adapters import Dora, Lora, RsLora, inject, merge_adapter, root_of, without_adapters
from models.llama import Llama
from models.safetensors_files import read_headers
from tests.models.helpers.adapted import disturb, with_memory
from tests.models.helpers.hf_models import tiny
from tests.models.helpers.saving import save_adapter

KINDS = (Lora, Dora, RsLora)
IDS = torch.arange(12).view(2, 6)
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


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


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_tied", "mixtral"])
@pytest.mark.parametrize("kind", KINDS)
def test_peft_reads_the_adapter_of_a_model_of_transformers(tmp_path: Path, name: str, kind: type[Lora]):
    saved = ["embed_tokens"] if name == "qwen3_tied" else None
    model = filled(tiny(name, "meta"), kind(4, 8, modules_to_save=saved))
    save_adapter(model, tmp_path)
    loaded = PeftModel.from_pretrained(base_of(model, type(model.hf)(model.hf.config)), tmp_path).eval()
    logits = model.hf(IDS).logits
    # AutoPeftModelForCausalLM asks for this kind.
    assert type(loaded) is PeftModelForCausalLM
    assert torch.equal(loaded(IDS).logits, logits)
    torch.testing.assert_close(loaded.merge_and_unload()(IDS).logits, logits, rtol=1e-5, atol=1e-6)
    merge_adapter(model)
    torch.testing.assert_close(model.hf(IDS).logits, logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_is_loaded_again(tmp_path: Path, kind: type[Lora]):
    adapter = kind(4, 8, modules_to_save=["lm_head"])
    model, other = llama(adapter), llama(adapter, seed=1)
    save_adapter(model, tmp_path)
    assert not torch.equal(model(IDS), other(IDS))
    load_adapter(other, tmp_path)
    assert torch.equal(model(IDS), other(IDS))


@pytest.mark.parametrize("adapter", [Lora(4, 16), Lora(4, 3), RsLora(4, 8)], ids=str)
def test_another_alpha_computes_the_same(tmp_path: Path, adapter: Lora):
    model, other = llama(Lora(4, 8)), llama(adapter, seed=1)
    save_adapter(model, tmp_path)
    check_adapter(other, tmp_path / WEIGHTS_FILE)
    load_adapter(other, tmp_path)
    torch.testing.assert_close(other(IDS), model(IDS), rtol=1e-5, atol=1e-6)
    assert adapter.alpha == 3 or torch.equal(other(IDS), model(IDS))


def test_a_file_of_diffusers_is_refused_for_another_model(tmp_path: Path):
    (tmp_path / "some.safetensors").touch()
    for given in (tmp_path, tmp_path / "some.safetensors"):
        with pytest.raises(ValueError, match=r"some\.safetensors is a file without .*: give a folder that peft"):
            load_adapter(llama(Lora(4, 8)), given)


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
        (Lora(2, 8), r"has r=4, and this adapter 2: give adapter\.rank=4$"),
        (Dora(4, 8), r"has use_dora=False, unlike this adapter: give adapter=lora$"),
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
        check_adapter(model.to("meta"), tmp_path)


def test_tied_modules_that_were_trained_apart_are_refused(tmp_path: Path):
    """peft trains modules_to_save as copies, which are not tied unless it is asked for."""
    model = Llama(**SIZES, **HEADS, tie_word_embeddings=True)
    inject(model, Lora(4, 8, modules_to_save=["embed_tokens", "lm_head"]), torch.float32)
    save_adapter(disturb(model), tmp_path)
    load_adapter(model, tmp_path)
    name = "base_model.model.lm_head.weight"
    values = load_file(tmp_path / WEIGHTS_FILE)
    save_file(values | {name: values[name] + 1}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ValueError, match=r"differ, but the model has one for both: train .* ensure_weight_tying=True$"):
        check_adapter(model, tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("alpha_pattern", {"q_proj": 16}),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("alora_invocation_tokens", [3]),
    ],
)
def test_settings_of_peft_that_cannot_be_had_are_refused(tmp_path: Path, key: str, value: Any):
    save_adapter(llama(Lora(4, 8)), tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=rf"has {key}={re.escape(str(value))}, which cannot be loaded here$"):
        load_adapter(llama(Lora(4, 8)), tmp_path)


def test_a_folder_without_an_adapter_or_its_weights_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot be read .*: give a folder that peft has saved"):
        check_adapter(llama(Lora(4, 8)), tmp_path)
    save_adapter(llama(Lora(4, 8)), tmp_path)
    check_adapter(llama(Lora(4, 8)), tmp_path)
    (tmp_path / WEIGHTS_FILE).unlink()
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is missing"):
        check_adapter(llama(Lora(4, 8)), tmp_path)


def test_values_of_other_files_have_the_dtypes_of_the_adapter(tmp_path: Path):
    model = llama(Lora(4, 8.0))
    save_adapter(model.bfloat16(), tmp_path)
    assert all(isinstance(each, nn.Parameter) for each in adapter_parameters(model).values())
    others = {name: torch.randn(tensor.shape) for name, tensor in adapter_tensors(model).items()}
    save_file(others, tmp_path / "others.safetensors")
    own = adapter_values(tmp_path, {})
    assert all(torch.equal(tensor, own[name]) for name, tensor in adapter_tensors(model).items())
    found = adapter_values(tmp_path, read_headers([tmp_path / "others.safetensors"]))
    assert all(torch.equal(tensor, others[name].bfloat16()) for name, tensor in found.items())
