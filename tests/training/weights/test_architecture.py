"""A config.json beside the weights that describes another model is refused, and the advice makes it the same model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.test_any_model import UNET
from tests.training.helpers.in_process import TINY_RUN, components_of, composed, run_here
from tests.training.helpers.pretrained_folder import SIZES, save_pretrained
from training.errors import UserError
from training.runs.directory import RunDirectory
from training.saved_runs.export import export
from training.settle.components import Components, acquired, attached
from training.weights.files import ModelWeights
from training.weights.filling import fill_buffers, fill_parameters

PLAIN = tuple(entry for entry in TINY_RUN if not entry.startswith("model."))
LLAMA = (*PLAIN, *(f"model.{key}={value}" for key, value in SIZES.items() if key != "max_position_embeddings"))
SHAPE = "{" + ", ".join(f"{key}: {value}" for key, value in {**SIZES, "rms_norm_eps": 1e-5}.items()) + "}"
IDS = torch.tensor([[1, 40, 7, 99, 3, 250, 12, 8]])
OLD_SCALING = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}


def changed(folder: Path, **values: Any) -> Path:
    """Changes a config.json; the newer spelling of rotary angles makes way for an older one."""
    file = folder / "config.json"
    found = json.loads(file.read_text())
    if {"rope_theta", "rope_scaling"} & values.keys():
        found.pop("rope_parameters", None)
    file.write_text(json.dumps(found | values))
    return folder


def refusal_of(*overrides: str) -> str:
    with pytest.raises(UserError) as refusal:
        components_of(*overrides)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def advice_of(line: str) -> list[str]:
    """The overrides that a message ends with."""
    text = re.split(r": (?:give|take) ", line)[-1]
    return re.findall(r"model(?:\.\w+)?=(?:\{.*\}|\S+)", text)


def logits_of(components: Components) -> torch.Tensor:
    with acquired(components.device) as streams, attached(components, streams) as found, torch.no_grad():
        model = found.model
        fill_buffers(model)
        weights = ModelWeights.find(components.config.model.weights)
        fill_parameters(model, components.config, torch.device("cpu"), weights)
        found = getattr(model, "hf", model).eval()(IDS)
        return getattr(found, "logits", found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_pretrained(tmp_path / "m", "llama", tokenizer=False)
    return tmp_path / "m"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, "rope_theta=500000.0 and not 10000.0"),
        ({"rope_theta": 300000.0}, "rope_theta=300000.0 and not 10000.0"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps=0.001 and not 1e-05"),
        ({"num_attention_heads": 8}, "num_attention_heads=8 and not 4"),
        ({"rope_scaling": OLD_SCALING["rope_scaling"], "rope_theta": 1e4}, "rope_type=linear, which"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type=linear, which"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu, which"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1, which"),
        ({"model_type": "mistral"}, "model_type=mistral, which"),
    ],
)
def test_values_that_our_llama_would_ignore_are_named_with_what_mends_them(
    folder: Path, values: dict[str, Any], named: str
):
    changed(folder, **values)
    if "num_attention_heads" in values:
        changed(folder, head_dim=4)
        # As many keys and values of half the size: the shapes do not tell.
        changed(folder, num_key_value_heads=4)
    job = (*LLAMA, "precision=fp32", f"model.weights={folder}")
    line = refusal_of(*job)
    assert line.startswith(f"model.weights={folder}: its config.json has ")
    assert named in line
    advice = advice_of(line)
    if "model=hf" in advice:
        job = (*PLAIN, "precision=fp32", f"model.weights={folder}")
    logits = logits_of(components_of(*job, *advice))
    expected = AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits
    torch.testing.assert_close(logits, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("values", [{"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 16}])
def test_layers_that_our_llama_has_not_are_named(tmp_path: Path, values: dict[str, Any]):
    save_pretrained(tmp_path, "llama", tokenizer=False, **values)
    (name,) = values
    line = refusal_of(*LLAMA, f"model.weights={tmp_path}")
    assert line == (
        f"model.weights={tmp_path}: its config.json has {name}={values[name]}, which the Llama of this repository does"
        f" not compute: take model=hf model.source={tmp_path}"
    )
    components_of(*PLAIN, f"model.weights={tmp_path}", *advice_of(line))


def test_tied_embeddings_are_named(tmp_path: Path):
    save_pretrained(tmp_path, "llama", tokenizer=False, tie_word_embeddings=True)
    job = (*LLAMA, "precision=fp32", f"model.weights={tmp_path}")
    line = refusal_of(*job)
    assert line.endswith("has tie_word_embeddings=True and not False: give model.tie_word_embeddings=true")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(IDS).logits
    logits = logits_of(components_of(*job, *advice_of(line)))
    torch.testing.assert_close(logits, expected.detach(), rtol=1e-4, atol=1e-5)


def test_the_same_values_are_taken(folder: Path):
    components_of(*LLAMA, f"model.weights={folder}")
    # Files alone tell nothing.
    (folder / "config.json").unlink()
    components_of(*LLAMA, f"model.weights={folder}")
    components_of(*LLAMA, f"model.weights={folder}/model.safetensors")


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters.rope_theta="),
        ("llama", {"rms_norm_eps": 1e-3}, "rms_norm_eps=0.001 and not 1e-05"),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}, "sliding_window="),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type=linear"),
    ],
)
def test_a_source_that_differs_from_the_weights_is_refused(
    tmp_path: Path, kind: str, values: dict[str, Any], named: str
):
    save_pretrained(tmp_path, kind, tokenizer=False, **values)
    job = (*PLAIN, "precision=fp32", "model=hf", f"model.source={kind}", f"model.overrides={SHAPE}")
    line = refusal_of(*job, f"model.weights={tmp_path}")
    assert line.startswith(f"model.weights={tmp_path}: its config.json has ")
    assert named in line
    logits = logits_of(components_of(*job, f"model.weights={tmp_path}", *advice_of(line)))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(IDS).logits
    assert torch.equal(logits, expected)


def test_what_weights_were_trained_with_is_compared_unless_it_is_given(tmp_path: Path):
    save_pretrained(tmp_path, "llama", tokenizer=False, attention_dropout=0.1)
    job = (*PLAIN, "model=hf", "model.source=llama", f"model.weights={tmp_path}")
    line = refusal_of(*job, f"model.overrides={SHAPE}")
    assert "its config.json has attention_dropout=0.1 and not 0.0: take model.source=" in line
    model = components_of(*job, f"model.overrides={SHAPE}", *advice_of(line)).model
    assert model.hf.config.attention_dropout == 0.1
    components_of(*job, f"model.overrides={SHAPE[:-1]}, attention_dropout: 0.0}}")


def test_a_checkpoint_is_compared_with_the_model_of_its_run(tmp_path: Path):
    job = (*PLAIN, "model=hf", "model.source=llama", "steps=1")
    theta = SHAPE[:-1] + ", rope_parameters: {rope_type: default, rope_theta: 500000.0}}"
    run_here(tmp_path, *job, f"model.overrides={theta}", "checkpoint.every=1")
    weights = f"model.weights={tmp_path}/checkpoints/step-00000001"
    line = refusal_of(*job, f"model.overrides={SHAPE}", weights)
    assert "rope_parameters.rope_theta=500000.0 and not 10000.0: take model.source=llama model.overrides={" in line
    components_of(*job, weights, *advice_of(line))


def test_a_model_of_diffusers_is_compared_too(tmp_path: Path):
    unet = (*PLAIN, *UNET)
    run_here(tmp_path / "run", *unet, "steps=1", "checkpoint.every=1")
    RunDirectory(tmp_path / "run").write_config(*composed(*unet, "steps=1", run_dir=tmp_path / "run"))
    export(str(tmp_path / "run"), str(tmp_path / "out"), [])
    exported = (*unet, f"model.weights={tmp_path}/out", "task.scheduler=null")
    components_of(*exported)
    changed(tmp_path / "out", norm_eps=0.1)
    line = refusal_of(*exported)
    assert "its config.json has norm_eps=0.1 and not 1e-05: take model.source=" in line
    components_of(*exported, *advice_of(line))
