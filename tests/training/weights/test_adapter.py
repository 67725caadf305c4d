"""Runs that train an adapter: the same in every mode, with small checkpoints, from which they resume bit for bit."""

import json
import logging
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from models.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from models.adapters import Lora, config_of, inject, is_adapted
from tests.training.helpers import results
from tests.training.helpers.in_process import TINY_RUN, components_of, run_here
from tests.training.run.test_build import is_free
from training.errors import UserError
from training.weights.adapter import RunAdapter, warn_of_unused

RUN = (*TINY_RUN, "steps=4", "log_every=1", "checkpoint.every=2", "seq_len=16")
ADAPTER = ("adapter=dora", "adapter.rank=2", "adapter.dropout=0.1", "adapter.modules_to_save=[norm]")
MODES = ("none", "layer_stream", "shard_offload")
SHARDS = {"shard_offload": ("offload.shards=2",)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints after the second and the fourth step."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    summary = run_here(folder, *RUN, *ADAPTER)
    assert 0 < summary["model/trained_parameters"] < summary["model/parameters"] / 4
    return folder


def at(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_a_run_resumes_under_any_mode_to_the_same_bits(tmp_path: Path, whole: Path, mode: str):
    run_here(tmp_path / "rest", *RUN, *ADAPTER, f"offload={mode}", *SHARDS.get(mode, ()), f"resume={at(whole, 2)}")
    assert results.curve(tmp_path / "rest") == results.curve(whole)[2:]
    one, other = (results.content(at(folder, 4)) for folder in (whole, tmp_path / "rest"))
    names = [name for name in one if name.endswith(".safetensors")]
    assert names == ["adapter_model.safetensors", "optimizer.safetensors", "random.safetensors"]
    assert all(one[name] == other[name] for name in names)
    assert is_free()


def test_a_checkpoint_has_the_adapter_and_names_its_base(whole: Path):
    folder = at(whole, 4)
    assert json.loads((folder / "base.json").read_text()) == {"seed": 0, "weights": None, "sha256": {}}
    assert json.loads((folder / CONFIG_FILE).read_text())["use_dora"]
    assert (folder / WEIGHTS_FILE).stat().st_size < 40_000
    assert not (folder / "model.safetensors").exists()


def test_an_adapter_begins_a_new_run(tmp_path: Path, whole: Path):
    summary = run_here(
        tmp_path / "new", *RUN, *ADAPTER, f"adapter.weights={at(whole, 4)}", "steps=1", "adapter.dropout=0"
    )
    assert summary["train/final_loss"] < results.curve(whole)[0]["train/loss"]


def test_another_base_and_another_dropout_are_told(tmp_path: Path, whole: Path, caplog: pytest.LogCaptureFixture):
    folder = shutil.copytree(at(whole, 4), tmp_path / "adapter")
    components = components_of(*RUN, *ADAPTER, f"adapter.weights={folder}")
    RunAdapter.of(components.config, components.model, starts=True)
    assert not caplog.messages
    values = json.loads((folder / CONFIG_FILE).read_text())
    others = {"base_model_name_or_path": "some/Other-1B", "lora_dropout": 0.05}
    (folder / CONFIG_FILE).write_text(json.dumps(values | others))
    RunAdapter.of(components.config, components.model, starts=True)
    assert caplog.messages == [
        f"adapter.weights={folder}: its base is some/Other-1B, and here model.weights=null",
        f"adapter.weights={folder}: adapter.dropout=0.1, and it was trained with lora_dropout=0.05",
    ]
    caplog.clear()
    components.config.model.weights, components.config.adapter.dropout = "copies/Other-1B@main", 0.05
    RunAdapter.of(components.config, components.model, starts=True)
    assert not caplog.messages


@pytest.mark.slow
def test_a_base_that_was_loaded_is_loaded_again_and_compared(tmp_path: Path):
    small = [o for o in RUN if not o.startswith(("steps", "checkpoint"))]
    run_here(tmp_path / "base", *small, "steps=1", "checkpoint.every=1")
    base = at(tmp_path / "base", 1)
    lora = (*RUN, "adapter=lora", "adapter.rank=2", "schedule.warmup=0")
    run_here(tmp_path / "run", *lora, f"model.weights={base}")
    saved = json.loads((at(tmp_path / "run", 2) / "base.json").read_text())
    assert (saved["seed"], saved["weights"], list(saved["sha256"])) == (None, str(base), ["model.safetensors"])
    # Elsewhere, with the same contents.
    moved = shutil.copytree(base, tmp_path / "moved")
    resumed = (*lora, f"resume={at(tmp_path / 'run', 2)}")
    run_here(tmp_path / "rest", *resumed, f"model.weights={moved}", "offload=layer_stream")
    assert results.curve(tmp_path / "rest") == results.curve(tmp_path / "run")[2:]
    content = bytearray((moved / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (moved / "model.safetensors").write_bytes(content)
    for weights, now in ((moved, f"model.weights={moved}, with other contents"), ("null", "seed=0")):
        with pytest.raises(UserError, match=f"the frozen base was loaded from model.weights={base}, and is {now}"):
            run_here(tmp_path / "refused", *resumed, f"model.weights={weights}")
    assert is_free()


def test_an_adapter_resumes_as_no_other(tmp_path: Path, whole: Path):
    for overrides, problem in (
        (("adapter=lora",), "adapter._target_: was models.adapters.Dora, is models.adapters.Lora"),
        (("adapter=none",), "adapter._target_: was models.adapters.Dora, is absent"),
        ((*ADAPTER, "adapter.alpha=3"), "adapter.alpha: was 32.0, is 3.0"),
    ):
        with pytest.raises(UserError, match=problem):
            run_here(tmp_path, *RUN, *overrides, f"resume={at(whole, 2)}")


@pytest.mark.slow
def test_slips_are_one_line(tmp_path: Path):
    for overrides, problem in (
        (("adapter.targets=[q_prj]",), "adapter.targets=q_prj: matches no module; the model has down_proj, gate_proj,"),
        (("adapter.modules_to_save=[nrm]",), "adapter.modules_to_save=nrm: matches no module; the model has"),
        ((f"adapter.weights={tmp_path}",), f"adapter.weights={tmp_path}: {tmp_path / CONFIG_FILE} cannot be read"),
        (("adapter.rank=0",), "adapter.rank=0: must be at least 1"),
        (("adapter.dropout=1",), "adapter.dropout=1.0: must be at most 0.999"),
        (("adapter.alpha=0",), "adapter.alpha=0.0: must be above 0"),
    ):
        with pytest.raises(UserError) as refusal:
            run_here(tmp_path / "run", *RUN, "adapter=lora", *overrides)
        assert str(refusal.value).startswith(problem)
        assert "\n" not in str(refusal.value)


def test_the_directory_of_a_run_is_not_its_adapter(tmp_path: Path, whole: Path):
    with pytest.raises(UserError, match=rf"^adapter\.weights={whole}: is the directory of a run: give one of its "):
        run_here(tmp_path / "run", *RUN, "adapter=lora", f"adapter.weights={whole}")


def test_dora_on_weights_that_begin_at_zero_is_one_line(tmp_path: Path):
    dit = (
        "model=diffusers",
        "model.source=DiTTransformer2DModel",
        "model.overrides={sample_size: 4, in_channels: 1, num_layers: 1, num_attention_heads: 2, attention_head_dim: 4,"
        " num_embeds_ada_norm: 3}",
        "task=flow_matching",
        "task.null_class=3",
        "dataset=synthetic_images",
        "dataset.shape=[1,4,4]",
        "dataset.num_classes=3",
    )
    job = [option for option in TINY_RUN if not option.startswith(("model.", "dataset="))]
    with pytest.raises(UserError, match=r"^adapter=dora: .*\.norm1\.linear has rows of zeros, .*: take another"):
        run_here(tmp_path, *job, *dit, "adapter=dora")


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path, whole: Path):
    with pytest.raises(UserError, match=r"^adapter\.weights=.* has r=2, and this adapter 3: give adapter\.rank=2$"):
        run_here(tmp_path, *RUN, *ADAPTER, "adapter.rank=3", f"adapter.weights={at(whole, 4)}")
    assert is_free()
    assert list(tmp_path.iterdir()) == []  # before the machine is measured and memory allocated


@pytest.mark.slow
def test_what_trains_stays_on_the_device_unless_it_is_asked_to_stream():
    chosen = components_of("adapter=lora", "offload=layer_stream")
    assert (chosen.mode.trained, chosen.optimizer_class.overlaps) == ("device", False)
    swapped = components_of("adapter=lora", "offload=layer_stream_swap")
    assert (swapped.mode.weights.trained, swapped.optimizer_class.overlaps) == ("device", False)
    asked = components_of("adapter=lora", "offload=layer_stream", "offload.trained=stream", "optimizer=host_adamw")
    assert (asked.mode.trained, asked.optimizer_class.overlaps) == ("stream", True)
    plain = components_of("offload=layer_stream")
    assert (plain.mode.trained, plain.optimizer_class.overlaps) == ("stream", True)
    with pytest.raises(UserError, match=r"^offload\.trained=device: nothing of the model is frozen"):
        components_of("offload=layer_stream", "offload.trained=device")


def test_host_adamw_updates_what_stays_on_the_device(tmp_path: Path, whole: Path):
    overrides = ("offload=layer_stream", "optimizer=host_adamw")
    run_here(tmp_path, *RUN, *ADAPTER, *overrides)
    assert results.curve(tmp_path) == results.curve(whole)


def test_an_adapter_is_made_of_its_configuration():
    components = components_of(*ADAPTER, "adapter.alpha=3", "adapter.targets=[q_proj]", "precision=bf16")
    config = config_of(components.model)
    assert (config.r, config.lora_alpha, config.lora_dropout, config.target_modules) == (2, 3, 0.1, {"q_proj"})
    assert {parameter.dtype for parameter in components.model.parameters()} == {torch.bfloat16}
    assert RunAdapter.of(components.config, components.model, starts=True) == RunAdapter(0, None, None)
    without = components_of()
    assert not is_adapted(without.model)
    assert RunAdapter.of(without.config, without.model, starts=True) is None


class Reads(nn.Module):
    """The second layer is not called."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.layers[0](inputs), self.layers[1].weight)


def test_an_adapter_without_effect_is_a_warning(caplog: pytest.LogCaptureFixture):
    model = Reads()
    inject(model, Lora(2, 4, targets=["0"]), torch.float32)
    model(torch.ones(1, 4)).sum().backward()
    warn_of_unused(model)
    assert not caplog.records
    model = Reads()
    inject(model, Lora(2, 4), torch.float32)
    model(torch.ones(1, 4)).sum().backward()
    warn_of_unused(model)
    (record,) = caplog.records
    assert record.getMessage().startswith("adapter: layers.1.lora_A.default.weight and 1 more got no gradient in the")


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"^adapter: the package peft is not installed: pip install peft$"):
        components_of("adapter=lora")


def test_peft_is_quiet(caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder):
    with caplog.at_level(logging.WARNING):
        components_of("adapter=lora", "model=hf", "model.source=gpt2", "model.overrides={n_layer: 1, n_embd: 12}")
    assert not caplog.records
    assert not [warning for warning in recwarn if "peft" in str(warning.filename)]
