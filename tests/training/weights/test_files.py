"""The weights of `model.weights`: local ones, and those of the Hugging Face Hub, with a client that is not asked."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from tests.training.helpers.in_process import SMALL_MODEL, TINY_RUN, components_of, composed, run_here
from training.data.hub_client import HubName
from training.errors import UserError
from training.planning.plan_only import plan_only
from training.weights.files import CONFIG_FILE, PATTERNS, SMALL_FILES, ModelWeights, weight_files_in


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A Hub with one model, which has the file model.safetensors; `asked` has the requests."""
    hub = SimpleNamespace(asked=[], files=["config.json", "model.safetensors"], fails=None, cached=False, part="")

    def model_info(_, name: str, revision: None, timeout: float):
        hub.asked.append(name)
        if hub.fails:
            raise hub.fails
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in hub.files])

    def snapshot_download(
        name: str, *, revision: None, cache_dir, allow_patterns, ignore_patterns=(), local_files_only=False
    ):
        if (local_files_only and not hub.cached) or hub.fails:
            raise hub.fails or OSError("not cached")
        assert cache_dir == str(tmp_path)
        if not local_files_only:
            assert allow_patterns == [f"{hub.part}{name}" for name in (*PATTERNS, CONFIG_FILE)] + [*SMALL_FILES]
            assert ("*/*" in ignore_patterns) == (hub.part == "")
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return hub


def test_local_files_are_taken_without_asking_anybody(tmp_path: Path, hub):
    (tmp_path / "model.safetensors").touch()
    assert ModelWeights.find(str(tmp_path)).path() == tmp_path
    assert not hub.asked


def test_the_directory_of_a_run_is_not_one_of_its_checkpoints(tmp_path: Path):
    for step in (5, 10):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    newest = f"{tmp_path}/checkpoints/step-00000010"
    reason = "is the directory of a run: give one of its checkpoints"
    with pytest.raises(UserError, match=rf"^model\.weights={tmp_path}/: {reason}, model\.weights={newest}$"):
        ModelWeights.find(f"{tmp_path}/")


def test_a_checkpoint_whose_model_was_deleted_is_not_one(tmp_path: Path):
    """Its optimizer states are in safetensors too, and would be taken for another model."""
    for name in ("manifest.json", "state.json", "optimizer.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"^model\.weights=.*: the files of the model are missing from this checkpoint"):
        ModelWeights.find(str(tmp_path))


def test_an_adapter_is_not_a_model(tmp_path: Path):
    """Nor is a checkpoint of one, which has files of the optimizer besides."""
    for name in ("adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"has an adapter and no model: give it as adapter=lora adapter\.weights=.*,"):
        ModelWeights.find(str(tmp_path))
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], "modules_to_save": ["lm_head"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    advice = (
        "adapter=lora adapter.rank=4 adapter.alpha=8 'adapter.targets=[q_proj,v_proj]' 'adapter.modules_to_save=[lm_"
    )
    with pytest.raises(UserError, match=f"give it as {re.escape(advice)}"):
        ModelWeights.find(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert ModelWeights.find(str(tmp_path)).path() == tmp_path


def test_a_name_is_that_of_a_model_on_the_hub(tmp_path: Path, hub, monkeypatch):
    found = ModelWeights.find("me/llama")
    assert hub.asked == ["me/llama"]
    # A streamed dataset moves the client's cache.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "elsewhere")
    assert found.path() == tmp_path


def test_a_cached_model_needs_no_network(tmp_path: Path, hub):
    (tmp_path / "model.safetensors").touch()
    hub.cached = True
    assert ModelWeights.find("me/llama").on_hub.name == "me/llama"
    assert not hub.asked


def test_of_a_pipeline_the_part_with_the_model_is_downloaded(tmp_path: Path, hub):
    hub.part = "unet/"
    hub.files = ["model_index.json", "whole.safetensors", "vae/config.json", "unet/config.json", "unet/a.safetensors"]
    assert ModelWeights.find("me/pipeline").path() == tmp_path
    hub.files.remove("unet/a.safetensors")
    with pytest.raises(UserError, match=r"that model has no \.safetensors file"):
        ModelWeights.find("me/pipeline")


def test_a_local_pipeline_has_weights_in_its_part(tmp_path: Path, hub):
    (tmp_path / "transformer").mkdir()
    for name in ("config.json", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"):
        (tmp_path / "transformer" / name).touch()
    assert ModelWeights.find(str(tmp_path)).path() == tmp_path
    assert [file.name for file in weight_files_in(tmp_path)] == ["diffusion_pytorch_model.safetensors"]


def test_without_a_network_the_line_says_how_to_do_it_by_hand(hub):
    hub.fails = ConnectionError("no route")
    advice = "or run `hf download me/llama --local-dir DIR` where there is a network, and give model.weights=DIR"
    with pytest.raises(
        UserError, match=r"model.weights=me/llama: no such file or folder here; .* did not answer"
    ) as raised:
        ModelWeights.find("me/llama")
    assert str(raised.value).endswith(advice)
    with pytest.raises(UserError, match=r"the download failed \(no route\)") as raised:
        ModelWeights("me/llama", HubName("me/llama"), "").path()
    assert str(raised.value).endswith(advice)


def test_a_model_without_safetensors_is_refused(hub):
    hub.files = ["pytorch_model.bin"]
    with pytest.raises(UserError, match=r"that model has no \.safetensors file"):
        ModelWeights.find("me/llama")


def test_weights_are_looked_for_before_anything_is_planned(tmp_path: Path, hub, monkeypatch):
    for module in ("training.run.prepare", "training.planning.plan"):
        monkeypatch.setattr(f"{module}.plan_filled", None)
    with pytest.raises(UserError, match=r"model\.weights=nowhere: does not exist: give"):
        run_here(tmp_path / "run", *SMALL_MODEL, "dataset=synthetic", "model.weights=nowhere")
    with pytest.raises(UserError, match=r"contains no .safetensors file"):
        plan_only(*composed(*SMALL_MODEL, f"model.weights={tmp_path}"))
    assert not hub.asked


def test_weights_that_are_not_finite_are_blamed_and_not_the_learning_rate(tmp_path: Path):
    model = components_of(*TINY_RUN).model
    weights = {name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()}
    damaged = list(weights)[3]
    weights[damaged].view(-1)[-1] = math.nan
    save_file(weights, tmp_path / "model.safetensors")
    run = (*TINY_RUN, "dataset=synthetic", f"model.weights={tmp_path}")
    with pytest.raises(UserError, match=rf"^step 1: .* model\.weights={tmp_path} has values .* in {damaged}: download"):
        run_here(tmp_path / "run", *run)
