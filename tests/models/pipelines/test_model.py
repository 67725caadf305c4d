"""The model of a pipeline's folder: its network, called with the conditions of encoded pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from models.pipelines.calls import NetworkCall
from models.pipelines.model import ASKED, build_pipeline
from models.pipelines.recording import Asked, Recorder
from tests.models.helpers.tiny_pipelines import made, network_of, saved


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_it_predicts_what_the_network_does_in_its_pipeline(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = saved(name, tmp_path_factory)
    model = build_pipeline(folder)
    model.load(folder)
    with pytest.raises(ValueError, match=r"no picture with latents \[4, 16, 16\] is encoded"):
        model(torch.zeros(1, 4, 16, 16), torch.zeros(1))
    pipeline = made(name)
    recorder = Recorder(pipeline, network_of(pipeline), torch.device("cpu"))
    call = NetworkCall.of(recorder, (32, 32))
    model.encoded().write_call(call)
    conditions = call.merged([call.conditions(recorder.record(Asked(("a cube",), (32, 32), (32, 32))))])
    noisy = torch.randn(1, *call.noise)
    batch = {f"{ASKED}{key}": value for key, value in conditions.items()}
    found = model(noisy, torch.tensor([0.25]), **batch)
    expected = network_of(pipeline)(**call.filled(noisy, torch.tensor([250.0]), conditions))[0]
    assert torch.equal(found, call.prediction(expected, noisy))
    assert torch.equal(model(noisy, torch.tensor([250]), **batch), found)
    assert model.tokens(call.noise) == (64 if name == "flux" else None)


def test_what_is_no_pipeline_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"it has no model_index.json: give the folder of a pipeline"):
        build_pipeline(tmp_path)
    (tmp_path / "model_index.json").write_text(
        '{"_class_name": "Two", "transformer": ["a", "B"], "transformer_2": ["a", "B"]}'
    )
    with pytest.raises(ValueError, match="Two has the networks transformer, transformer_2: one is trained here"):
        build_pipeline(tmp_path)
    # A list names code that is on the Hub.
    for kind in ("Mine", ["pipeline", "Mine"]):
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": kind, "unet": ["a", "B"]}))
        with pytest.raises(ValueError, match=r"^model_index.json names .*Mine.*, which diffusers .* has not: take"):
            build_pipeline(tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path):
    made("flux").save_pretrained(tmp_path)
    file = tmp_path / "transformer" / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "bitsandbytes"}}
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"^its weights are quantised: take those of FluxTransformer2DModel in bf16"):
        build_pipeline(tmp_path)
