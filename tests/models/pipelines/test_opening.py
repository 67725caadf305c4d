"""A pipeline is opened around a network that has no values: the files of its own are not read."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from models.pipelines.model import build_pipeline
from models.pipelines.opening import encoders_of, open_pipeline
from tests.models.helpers.tiny_pipelines import made, saved


@pytest.mark.parametrize("name", ["sdxl", "wan"])
def test_the_network_is_the_one_that_was_given(name: str, tmp_path_factory: pytest.TempPathFactory):
    folder = saved(name, tmp_path_factory)
    with torch.device("meta"):
        network = build_pipeline(folder).network
    for file in folder.glob("transformer/*.safetensors"):
        file.write_bytes(b"not read")
    pipeline = open_pipeline(folder, network, torch.bfloat16)
    assert (getattr(pipeline, "transformer", None) or pipeline.unet) is network
    texts, vae = encoders_of(pipeline, network)
    assert len(texts) == (2 if name == "sdxl" else 1)
    assert vae.dtype == texts[0].dtype == torch.bfloat16
    expected = made(name).vae.state_dict()
    assert all(torch.equal(tensor, expected[key].bfloat16()) for key, tensor in vae.state_dict().items())


def test_a_safety_checker_is_not_read(tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]):
    folder = saved("stable_diffusion", tmp_path_factory)
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"], "requires_safety_checker": True}
    (folder / "model_index.json").write_text(json.dumps(index))
    capfd.readouterr()
    assert open_pipeline(folder, made("stable_diffusion").unet, torch.float32).safety_checker is None
    assert not capfd.readouterr().err


@pytest.mark.parametrize("name", ["wan", "sdxl"])
def test_a_tokenizer_without_its_files_is_refused(name: str, tmp_path_factory: pytest.TempPathFactory):
    """Of a missing folder transformers makes one without words."""
    folder = saved(name, tmp_path_factory)
    shutil.rmtree(folder / "tokenizer")
    with torch.device("meta"):
        network = build_pipeline(folder).network
    refused = r"^diffusers cannot open the pipeline: tokenizer has no vocabulary: download the pipeline again$"
    with pytest.raises(ValueError, match=refused):
        open_pipeline(folder, network, torch.float32)


def test_what_cannot_be_opened_is_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory):
    folder = saved("sd3", tmp_path_factory)
    (folder / "vae" / "config.json").unlink()
    with torch.device("meta"):
        network = build_pipeline(folder).network
    with pytest.raises(ValueError, match=r"^diffusers cannot open the pipeline: [^\n]+$"):
        open_pipeline(folder, network, torch.float32)


def test_a_pipeline_without_text_encoders_is_refused():
    pipeline = made("flux")
    pipeline.text_encoder = pipeline.text_encoder_2 = None
    with pytest.raises(ValueError, match="FluxPipeline has no VAE or no text encoder"):
        encoders_of(pipeline, pipeline.transformer)
