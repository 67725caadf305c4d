"""An exported run is a model of its library with the same outputs, or an adapter of peft, alone or merged."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from models.weights import load_weights
from tests.test_any_model import COMMON, GPT2, UNET
from tests.training.helpers.in_process import TINY_RUN, composed, saved_run
from training.errors import UserError
from training.saved_runs.export import export, files_of
from training.saved_runs.finding import load_model
from training.settle.components import Components, acquired, attached
from training.weights.filling import fill_buffers

TEXT = ("dataset=stdlib", "dataset.max_tokens=20000")
RUNS = {
    "llama": (*TINY_RUN, *TEXT, "model.tie_word_embeddings=true"),
    "transformers": (*COMMON, *GPT2, *TEXT, "precision=fp32"),
    "diffusers": (*COMMON, *UNET, "precision=fp32"),
}
ADAPTED = ("adapter=lora", "adapter.rank=2")
SIZES = "hidden_size:16,intermediate_size:32,num_hidden_layers:2,num_attention_heads:4,num_key_value_heads:2"
MIXTRAL = f"model.overrides={{{SIZES},num_local_experts:4,num_experts_per_tok:2,vocab_size:257}}"
EXPERTS = ("model=hf", "model.source=mixtral", MIXTRAL, "adapter.experts=true")
# Runs that train an adapter.
ADAPTER_RUNS = {
    "llama": (*TINY_RUN, *TEXT),
    "transformers": RUNS["transformers"],
    "experts": (*COMMON, *EXPERTS, *TEXT, "precision=fp32"),
}
TRAINED = ("steps=2", "checkpoint.every=2", "optimizer.lr=0.1")
IDS = torch.tensor([[100, 101, 102, 32, 10]])


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run that was saved, and the name of its library."""
    overrides = (*RUNS[request.param], "steps=2", "checkpoint.every=1", "offload=bounce_linear")
    return request.param, saved_run(tmp_path_factory.mktemp(request.param), *overrides)


def own_output(library: str, folder: Path) -> torch.Tensor:
    """The logits, or the predicted velocity, of the model as the loop has it."""
    config, invocation = composed(*RUNS[library], "offload=none", run_dir=folder)
    components = Components.of(config, invocation, torch.device("cpu"))
    with acquired(components.device) as streams, attached(components, streams) as model, torch.no_grad():
        fill_buffers(model)
        load_weights(model, folder / "checkpoints" / "step-00000002")
        return output(library, model.eval() if library == "llama" else next(model.children()).eval())


def output(library: str, model: nn.Module) -> torch.Tensor:
    if library != "diffusers":
        found = model(IDS)
        return getattr(found, "logits", found)
    images = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return model(images, torch.tensor([3.0, 500.0]), class_labels=torch.tensor([0, 3]), return_dict=False)[0]


@pytest.mark.parametrize("max_shard_bytes", [2**30, 4000])
@pytest.mark.slow
def test_the_library_reads_what_was_trained(run: tuple[str, Path], tmp_path: Path, max_shard_bytes: int):
    library, folder = run
    names = export(str(folder), str(tmp_path / "out"), [], max_shard_bytes)
    assert names == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert (sum(name.endswith(".safetensors") for name in names) > 1) == (max_shard_bytes == 4000)
    if library == "diffusers":
        model = diffusers.UNet2DModel.from_pretrained(tmp_path / "out")
    else:
        model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(report.values()), report
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert tokenizer("def").input_ids == [100, 101, 102]
        assert model.config.eos_token_id == tokenizer.eos_token_id == 256
    with torch.no_grad():
        found, expected = output(library, model.eval()), own_output(library, folder)
    if library == "llama":
        assert isinstance(model, LlamaForCausalLM)
        # Its attention adds in another order.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_no_memory_is_made_for_the_model(run: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    library, folder = run
    made, empty = [], torch.empty_like

    def watched(tensor: torch.Tensor, **options: object) -> torch.Tensor:
        made.append(empty(tensor, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty_like", watched)
    export(str(folder / "checkpoints" / "step-00000001"), str(tmp_path / "out"), [])
    assert all(tensor.is_meta for tensor in made)
    assert library != "transformers" or made


@pytest.mark.slow
def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(run: tuple[str, Path], tmp_path: Path):
    library, folder = run
    sizes = {
        "llama": ["model.hidden_size=32"],
        "transformers": ["model.overrides={n_embd: 64}"],
        "diffusers": ["model.overrides={block_out_channels: [16, 16]}"],
    }
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for out, overrides, problem in (
        ("out", sizes[library], "choose the model that it was saved from"),
        ("full", [], "full is not empty: give a new folder"),
        ("full/mine/out", [], r"mine/out cannot be written \(Not a directory\): give another place"),
    ):
        with pytest.raises(UserError, match=problem) as refusal:
            export(str(folder), str(tmp_path / out), overrides)
        assert "\n" not in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_model_of_no_library_is_refused():
    config, _ = composed(*TINY_RUN)
    with pytest.raises(UserError, match="Linear is the model of no library"):
        files_of(nn.Linear(2, 2), config, lambda name: torch.empty(0), 2**30)


def test_quantised_weights_are_refused_in_one_line(tmp_path: Path):
    overrides = (*TINY_RUN, "steps=1", "checkpoint.every=1", "quantize=int8", "offload=none")
    saved_run(tmp_path / "run", *overrides)
    with pytest.raises(UserError, match="its weights are quantised, in a form that no library loads: begin a run"):
        export(str(tmp_path / "run"), str(tmp_path / "out"), [])
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module", params=ADAPTER_RUNS)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A run that was saved, and the logits of its model as the loop has it."""
    overrides = (*ADAPTED, *ADAPTER_RUNS[request.param], *TRAINED, "offload=bounce_linear")
    folder = saved_run(tmp_path_factory.mktemp(request.param), *overrides)
    config, invocation = composed(*overrides, run_dir=folder)
    components = Components.of(config, invocation, torch.device("cpu"))
    with acquired(components.device) as streams, attached(components, streams) as model, torch.no_grad():
        fill_buffers(model)
        load_model(model, folder / "checkpoints" / "step-00000002", config, components.device)
        logits = getattr(model, "hf", model).eval()(IDS)
    return folder, getattr(logits, "logits", logits)


@pytest.mark.slow
def test_it_is_merged_on_request_and_has_the_same_outputs(adapted: tuple[Path, torch.Tensor], tmp_path: Path):
    folder, expected = adapted
    assert "model.safetensors" in export(str(folder), str(tmp_path / "merged"), [], merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-4)


def test_the_adapter_alone_is_that_of_the_checkpoint(adapted: tuple[Path, torch.Tensor], tmp_path: Path):
    folder, _ = adapted
    names = export(str(folder), str(tmp_path / "adapter"), [])
    beside = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert names == ["adapter_config.json", "adapter_model.safetensors", *beside]
    for name in names[:2]:
        assert (tmp_path / "adapter" / name).read_bytes() == (folder / "checkpoints/step-00000002" / name).read_bytes()


def test_that_of_a_model_of_diffusers_has_a_file_that_its_pipelines_load(tmp_path: Path):
    folder = saved_run(tmp_path / "run", *COMMON, *UNET, "steps=1", "checkpoint.every=1", *ADAPTED)
    names = export(str(folder), str(tmp_path / "out"), [])
    assert names == ["adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors"]
    with safe_open(tmp_path / "out" / names[1], "pt") as pefts, safe_open(tmp_path / "out" / names[2], "pt") as ours:
        expected = {name.replace("base_model.model.", "unet.", 1): pefts.get_tensor(name) for name in set(pefts.keys())}
        assert expected.keys() == set(ours.keys())
        assert all(torch.equal(tensor, ours.get_tensor(name)) for name, tensor in expected.items())


@pytest.mark.slow
def test_a_merge_of_nothing_is_refused(tmp_path: Path):
    folder = saved_run(tmp_path / "run", *ADAPTER_RUNS["llama"], *TRAINED)
    with pytest.raises(UserError, match=r"^--merge: .* trained no adapter"):
        export(str(folder), str(tmp_path / "out"), [], merge=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_quantised_base_is_not_merged_but_the_one_that_it_was_made_of(tmp_path: Path):
    folder = saved_run(tmp_path / "run", *ADAPTER_RUNS["llama"], *TRAINED, *ADAPTED, "quantize=int8")
    with pytest.raises(UserError, match=r"^--merge: the base is quantised, quantize=int8: give quantize=none, which"):
        export(str(folder), str(tmp_path / "out"), [], merge=True)
    assert not (tmp_path / "out").exists()
    # As the message says.
    assert "model.safetensors" in export(str(folder), str(tmp_path / "out"), ["quantize=none"], merge=True)
