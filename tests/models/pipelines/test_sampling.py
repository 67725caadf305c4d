"""Pictures are those that the pipeline itself makes of a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.pipelines.recording import Asked, Recorder
from models.pipelines.sampling import PipelineSampler, encoded_prompt
from tests.models.helpers.tiny_pipelines import PIPELINES, made, network_of, saved

CPU, PROMPT, SIZE = torch.device("cpu"), "a red cube", (32, 32)


@pytest.mark.sampled
@pytest.mark.parametrize("name", PIPELINES)
def test_a_picture_is_that_of_the_pipeline(name: str, tmp_path_factory: pytest.TempPathFactory):
    folder, pipeline = saved(name, tmp_path_factory), made(name)
    network = network_of(pipeline).eval()
    encoded = encoded_prompt(Recorder(made(name), network, CPU), PROMPT, SIZE)
    found = PipelineSampler(folder, network, torch.float32, CPU).picture(PROMPT, encoded, SIZE, steps=3, seed=5)
    given = Recorder(pipeline, network, CPU).given
    arguments = given(Asked((PROMPT,), SIZE, SIZE), steps=3, guidance=None, output_type="pt")
    with torch.no_grad():
        expected = pipeline(**arguments, generator=torch.Generator().manual_seed(5))[0]
    assert found.shape == (3, *SIZE)
    assert torch.equal(found, expected[0].reshape(3, *SIZE) * 2 - 1)


def test_a_picture_that_nobody_waits_for_ends(tmp_path_factory: pytest.TempPathFactory):
    pipeline = made("sd3")
    encoded = encoded_prompt(Recorder(pipeline, pipeline.transformer, CPU), PROMPT, SIZE)
    sampler = PipelineSampler(saved("sd3", tmp_path_factory), pipeline.transformer, torch.float32, CPU)
    asked: list[bool] = []
    assert sampler.picture(PROMPT, encoded, SIZE, 5, 0, lambda: asked.append(True) or len(asked) == 2) is None
    assert len(asked) == 2


def test_text_encoders_are_not_read(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = saved("flux", tmp_path_factory)
    for file in folder.glob("text_encoder*/*.safetensors"):
        file.unlink()
    pipeline = made("flux")
    encoded = encoded_prompt(Recorder(pipeline, pipeline.transformer, CPU), PROMPT, SIZE)
    sampler = PipelineSampler(folder, pipeline.transformer, torch.float32, CPU)
    assert sampler.picture(PROMPT, encoded, SIZE, 1, 0).isfinite().all()
