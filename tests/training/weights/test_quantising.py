"""Runs with quantised weights: every mode to the same losses, resumed exactly, loaded once, refused in one line."""

import importlib.util
import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models.library_dtypes import default_dtype
from models.quantise import QuantisedWeight, is_quantised
from models.quantise_cache import SOURCE, CacheFile
from tests.models.helpers.small_diffusion import build
from tests.training.helpers.in_process import TINY_RUN, components_of, composed, run_here
from tests.training.helpers.results import losses
from training.errors import UserError
from training.weights.quantising import quantise_blocks

RUN = (*TINY_RUN, "steps=3", "log_every=1", "optimizer=host_adamw")
MODES = {
    "bounce_linear": ("offload=bounce_linear",),
    "layer_stream": ("offload=layer_stream", "offload.slots=1", "precision=fp32"),
    "shard_offload": ("offload=shard_offload", "offload.shards=2"),
}


def caches(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.quantised"))


@pytest.mark.slow
def test_every_mode_trains_and_resumes_alike(tmp_path: Path):
    keys = (*RUN, "quantize=int4", "quantize.group=16", "checkpoint.every=2")
    run_here(tmp_path / "resident", *keys, "offload=none")
    expected = losses(tmp_path / "resident")
    assert len(expected) == 3
    checkpoint = tmp_path / "resident" / "checkpoints" / "step-00000002"
    # transformers could not load it.
    assert not (checkpoint / "config.json").exists()
    for name, mode in MODES.items():
        run_here(tmp_path / name, *keys, *mode, f"resume={checkpoint}")
        assert losses(tmp_path / name) == expected[2:]


@pytest.mark.parametrize("quantize", ["int8", "float8", "nf4"])
@pytest.mark.slow
def test_each_format_trains_with_fewer_bytes(tmp_path: Path, quantize: str):
    for name in ("none", "layer_stream"):
        run_here(tmp_path / name, *RUN, "steps=2", f"quantize={quantize}", f"offload={name}")
    assert losses(tmp_path / "none") == losses(tmp_path / "layer_stream")
    plans = [json.loads((tmp_path / name / "plan.json").read_text()) for name in ("none", "layer_stream")]
    parts = components_of(*RUN, f"quantize={quantize}")
    assert plans[0]["device_bytes"]["weights"] == sum(parameter.nbytes for parameter in parts.model.parameters())


def test_loaded_weights_are_quantised_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run_here(tmp_path / "first", *RUN, "checkpoint.every=3")
    source = tmp_path / "first" / "checkpoints" / "step-00000003"
    keys = (*RUN, "steps=1", "quantize=int8", f"model.weights={source}", "schedule.warmup=0")
    with caplog.at_level(logging.INFO, "training.weights.quantising"):
        run_here(tmp_path / "none", *keys, "quantize.cache=false")
        assert caches(source) == []
        run_here(tmp_path / "made", *keys)
        (cache,) = caches(source)
        written = cache.stat()
        assert not caplog.records
        run_here(tmp_path / "read", *keys, "offload=layer_stream")
        assert str(cache) in caplog.text
    assert cache.stat().st_mtime_ns == written.st_mtime_ns
    assert losses(tmp_path / "none") == losses(tmp_path / "made") == losses(tmp_path / "read")
    with safe_open(cache, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(cache), cache, metadata | {SOURCE: "other weights"})
    with pytest.raises(UserError, match=r"^quantize\.cache=true: .* was made from other weights than those beside it"):
        run_here(tmp_path / "refused", *keys)
    cache.write_bytes(cache.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"^quantize\.cache=true: .* or give quantize\.cache=false$"):
        run_here(tmp_path / "refused", *keys)


def test_a_cache_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    run_here(tmp_path / "first", *RUN, "steps=1", "checkpoint.every=1")
    source = tmp_path / "first" / "checkpoints" / "step-00000001"

    def fail(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(CacheFile, "write", fail)
    run_here(tmp_path / "run", *RUN, "steps=1", "quantize=int8", f"model.weights={source}")
    assert "Read-only file system" in caplog.text
    assert losses(tmp_path / "run")


def test_layers_are_chosen_by_patterns():
    model = components_of(
        *RUN, "quantize=int8", "quantize.include=['*.mlp.*']", "quantize.exclude=['*layers.1*']"
    ).model
    found = [name for name, each in model.named_parameters() if isinstance(each, QuantisedWeight)]
    assert found == [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    assert not is_quantised(components_of(*RUN).model)
    assert all(tensor.is_meta for tensor in model.parameters())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("quantize=int8", "quantize.exclude=[down_proj]"),
            r"^quantize.exclude=down_proj: matches no layer: give a whole",
        ),
        (("quantize=int8", "quantize.include=[nothing]"), r"^quantize=int8: no linear layer .*include=\['nothing'\]"),
        (("quantize=int4", "quantize.group=3"), r"^quantize\.group=3: must be even"),
    ],
)
def test_what_cannot_be_quantised_is_one_line(overrides: tuple[str, ...], message: str):
    with pytest.raises(UserError, match=message) as error:
        components_of(*RUN, *overrides)
    assert "\n" not in str(error.value)


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^quantize=nf4: bitsandbytes is missing: pip install bitsandbytes==") as error:
        components_of(*RUN, "quantize=nf4")
    assert "\n" not in str(error.value)


def test_a_model_of_which_nothing_trains_is_refused(monkeypatch: pytest.MonkeyPatch):
    from training.settle import components

    class Linears(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))

    monkeypatch.setattr(components, "instantiate", lambda arguments: Linears())
    with pytest.raises(UserError, match=r"^quantize=int8: nothing of the model is left to train"):
        components_of(*RUN, "quantize=int8")


def test_layers_that_diffusers_keeps_in_float32_are_not_quantised():
    config, _ = composed("quantize=int8")
    with torch.device("meta"), default_dtype(torch.bfloat16):
        model = build("kandinsky5")
    quantise_blocks(model, config, torch.bfloat16)
    quantised = [name for name, parameter in model.named_parameters() if isinstance(parameter, QuantisedWeight)]
    assert any("attention.to_query" in name for name in quantised)
    assert not any("modulation" in name for name in quantised)
