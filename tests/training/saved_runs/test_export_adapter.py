"""A run that trained an adapter is exported as the adapter, and merged into its base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.test_any_model import COMMON, GPT2, UNET
from tests.training.helpers.in_process import TINY_RUN, composed, run_here
from training.errors import UserError
from training.runs.directory import RunDirectory
from training.saved_runs.export import export
from training.saved_runs.loading import load_model
from training.settle.components import Components, acquired, attached
from training.weights.filling import fill_buffers

TEXT = ("dataset=stdlib", "dataset.max_tokens=20000", "steps=2", "checkpoint.every=2", "optimizer.lr=0.1")
RUNS = {"llama": (*TINY_RUN, *TEXT), "transformers": (*COMMON, *GPT2, *TEXT, "precision=fp32")}
SIZES = "hidden_size:16,intermediate_size:32,num_hidden_layers:2,num_attention_heads:4,num_key_value_heads:2"
MIXTRAL = f"model.overrides={{{SIZES},num_local_experts:4,num_experts_per_tok:2,vocab_size:257}}"
EXPERTS = ("model=hf", "model.source=mixtral", MIXTRAL, "adapter.experts=true")
RUNS["experts"] = (*COMMON, *EXPERTS, *TEXT, "precision=fp32")
IDS = torch.tensor([[100, 101, 102, 32, 10]])


def made(folder: Path, *overrides: str) -> Path:
    run_here(folder, *overrides)
    RunDirectory(folder).write_config(*composed(*overrides, run_dir=folder))
    return folder


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A run that was saved, and the logits of its model as the loop has it."""
    overrides = ("adapter=lora", "adapter.rank=2", *RUNS[request.param], "offload=bounce_linear")
    folder = made(tmp_path_factory.mktemp(request.param), *overrides)
    config, invocation = composed(*overrides, run_dir=folder)
    components = Components.of(config, invocation, torch.device("cpu"))
    with acquired(components.device) as streams, attached(components, streams) as model, torch.no_grad():
        fill_buffers(model)
        load_model(model, folder / "checkpoints" / "step-00000002", config, components.device)
        logits = getattr(model, "hf", model).eval()(IDS)
    return folder, getattr(logits, "logits", logits)


@pytest.mark.slow
def test_it_is_merged_on_request_and_has_the_same_outputs(run: tuple[Path, torch.Tensor], tmp_path: Path):
    folder, expected = run
    assert "model.safetensors" in export(str(folder), str(tmp_path / "merged"), [], merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-4)


def test_the_adapter_alone_is_that_of_the_checkpoint(run: tuple[Path, torch.Tensor], tmp_path: Path):
    folder, _ = run
    names = export(str(folder), str(tmp_path / "adapter"), [])
    beside = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert names == ["adapter_config.json", "adapter_model.safetensors", *beside]
    for name in names[:2]:
        assert (tmp_path / "adapter" / name).read_bytes() == (folder / "checkpoints/step-00000002" / name).read_bytes()


def test_that_of_a_model_of_diffusers_has_a_file_that_its_pipelines_load(tmp_path: Path):
    folder = made(tmp_path / "run", *COMMON, *UNET, "steps=1", "checkpoint.every=1", "adapter=lora", "adapter.rank=2")
    names = export(str(folder), str(tmp_path / "out"), [])
    assert names == ["adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors"]
    with safe_open(tmp_path / "out" / names[1], "pt") as pefts, safe_open(tmp_path / "out" / names[2], "pt") as ours:
        expected = {name.replace("base_model.model.", "unet.", 1): pefts.get_tensor(name) for name in set(pefts.keys())}
        assert expected.keys() == set(ours.keys())
        assert all(torch.equal(tensor, ours.get_tensor(name)) for name, tensor in expected.items())


@pytest.mark.slow
def test_a_merge_of_nothing_is_refused(tmp_path: Path):
    folder = made(tmp_path / "run", *RUNS["llama"])
    with pytest.raises(UserError, match=r"^--merge: .* trained no adapter"):
        export(str(folder), str(tmp_path / "out"), [], merge=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_quantised_base_is_not_merged_but_the_one_that_it_was_made_of(tmp_path: Path):
    folder = made(tmp_path / "run", *RUNS["llama"], "adapter=lora", "adapter.rank=2", "quantize=int8")
    with pytest.raises(UserError, match=r"^--merge: the base is quantised, quantize=int8: give quantize=none, which"):
        export(str(folder), str(tmp_path / "out"), [], merge=True)
    assert not (tmp_path / "out").exists()
    # As the message says.
    assert "model.safetensors" in export(str(folder), str(tmp_path / "out"), ["quantize=none"], merge=True)
