"""Files of transformers models that are written here, and read by transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, PreTrainedModel

from models import hf_saving
from models.hf import build_hf
from models.hf_saving import hf_files, stored_form
from models.whole_folder import write_whole_folder
from tests.models.helpers.hf_models import LANGUAGE, MODELS, logits, tiny, trained
from tests.models.helpers.saving import save_hf

FILE = "model.safetensors"
# Small enough that each layer has a file of its own.
SHARD_BYTES = 3000


def by_transformers(name: str, folder: Path) -> PreTrainedModel:
    auto = AutoModelForCausalLM if name in LANGUAGE else AutoModelForImageClassification
    model, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "qwen3_tied", "mixtral", "mamba", "deepseek_v3", "vit"])
def test_transformers_reads_what_was_saved(name: str, tmp_path: Path):
    model = trained(name)
    save_hf(model, tmp_path, SHARD_BYTES)
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    assert torch.equal(logits(name, by_transformers(name, tmp_path)), logits(name, model.hf))


@pytest.mark.parametrize("name", MODELS)
def test_files_are_those_of_transformers(name: str, tmp_path: Path):
    model = trained(name)
    save_hf(model, tmp_path / "ours")
    model.hf.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / who / FILE) for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_the_folder_is_a_source(tmp_path: Path):
    model = trained("qwen3")
    save_hf(model, tmp_path)
    with torch.device("meta"):
        again = build_hf(str(tmp_path), "causal_lm")
    assert again.hf.config.to_dict() | {"architectures": []} == model.hf.config.to_dict()
    assert again.hf.config.architectures == ["Qwen3ForCausalLM"]
    assert json.loads((tmp_path / "config.json").read_text())["use_cache"]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_tied"])
def test_a_model_without_memory_is_saved_with_the_values_that_are_read(name: str, tmp_path: Path, monkeypatch):
    model = trained(name)
    save_hf(model, tmp_path / "whole", SHARD_BYTES)
    values, converted = dict(model.hf.state_dict()), []
    files = hf_files(tiny(name, "meta"), SHARD_BYTES, values.__getitem__, {"eos_token_id": 7})
    form = hf_saving.stored_form
    monkeypatch.setattr(hf_saving, "stored_form", lambda *given: converted.append(len(given[1])) or form(*given))
    write_whole_folder(tmp_path / "read", files)
    # One layer after another: the tensors outside the layers, and each layer's.
    assert len(converted) == 3
    for file in (tmp_path / "whole").glob("*.safetensors*"):
        assert file.read_bytes() == (tmp_path / "read" / file.name).read_bytes()
    assert json.loads((tmp_path / "read" / "config.json").read_text())["eos_token_id"] == 7


def test_a_model_without_memory_and_tensors_that_cannot_be_converted_back(tmp_path: Path):
    with pytest.raises(ValueError, match="is on the meta device: allocate its memory"):
        save_hf(tiny("gpt2", "meta"), tmp_path / "a")
    experts = {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(4)}
    with pytest.raises(ValueError, match=r"gate_up_proj cannot be converted to the form of files"):
        stored_form(tiny("mixtral", "meta").hf, experts)
    assert list(tmp_path.iterdir()) == []
