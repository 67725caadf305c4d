"""Pictures of prompts between steps: the same under each mode, by the pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from PIL import Image

from tests.models.helpers.tiny_pipelines import made, saved
from tests.training.helpers.captioned import draw_pictures, overrides_of
from tests.training.helpers.in_process import components_of, run_here
from training.errors import UserError
from training.run import encoding
from training.tasks.pipeline_samples import sample_size

SAMPLES = ("sample.every=1", "sample.prompts=['a red ball', 'a blue one']", "task.sample_steps=2")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_samples_are_equal_under_each_mode_and_change_with_training(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    overrides = (*overrides_of(saved("flux", tmp_path_factory), draw_pictures(tmp_path / "pictures")), *SAMPLES)
    pictures = {}
    for mode in ("none", "layer_stream"):
        run_here(tmp_path / mode, *overrides, f"offload={mode}")
        files = sorted((tmp_path / mode / "samples").glob("*.png"))
        pictures[mode] = [np.asarray(Image.open(file)) for file in files]
        assert len(pictures[mode]) == 3
        # Prompts are encoded once, too.
        monkeypatch.setattr(encoding, "opened", None)
    assert all(map(np.array_equal, pictures["none"], pictures["layer_stream"]))
    first, *_, last = pictures["none"]
    assert not np.array_equal(first, last)


def test_samples_are_made_by_the_scheduler_of_the_weights(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    """A model of v beside the pipeline of one that predicts noise."""
    source, weights = saved("sdxl", tmp_path_factory), tmp_path / "weights"
    pipeline = made("sdxl")
    pipeline.scheduler = DDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True)
    pipeline.save_pretrained(weights)
    overrides = (*overrides_of(source, draw_pictures(tmp_path / "pictures"), "noise_prediction"), *SAMPLES)
    run_here(tmp_path / "run", *overrides, f"model.weights={weights}", "steps=1", "sample.prompts=['a red ball']")
    found = np.asarray(Image.open(tmp_path / "run" / "samples" / "step-000000.png"))[1:-1, 1:-1]
    given = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "np"}
    expected = pipeline("a red ball", **given, generator=torch.Generator().manual_seed(0))[0][0]
    np.testing.assert_allclose(found, expected * 255, atol=1)


@pytest.mark.parametrize("key", ["drop_condition=0.3", "guidance=7.5", "sample_count=4", "null_class=8"])
def test_keys_that_a_pipeline_does_not_follow_are_refused(key: str, tmp_path: Path, tmp_path_factory):
    overrides = overrides_of(saved("sd3", tmp_path_factory), draw_pictures(tmp_path / "pictures"))
    with pytest.raises(UserError, match=rf"^task\.{key}: has no effect with model=pipeline: leave it out; dataset"):
        components_of(*overrides, f"task.{key}")


def test_samples_without_prompts_are_refused(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    overrides = overrides_of(saved("sd3", tmp_path_factory), draw_pictures(tmp_path / "pictures"))
    components = components_of(*overrides, "sample.every=1")
    with pytest.raises(UserError, match=r"^sample\.every=1: give sample\.prompts="):
        components.task.sampler(components.config, components.model)


def test_a_sample_has_the_pixels_of_the_dataset(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    overrides = overrides_of(saved("sd3", tmp_path_factory), draw_pictures(tmp_path / "pictures"))
    assert sample_size(components_of(*overrides, "dataset.size=100").config) == (96, 96)
