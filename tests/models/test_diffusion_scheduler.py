"""Schedulers of training, read from the files of samplers: compared with what diffusers makes of the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from models.diffusion_scheduler import is_flow, library, of_config, read_scheduler, shift_by_tokens, shifted

SCALED = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
ZERO_SNR = {**SCALED, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}


def saved(folder: Path, name: str, **config: Any) -> Path:
    getattr(diffusers, name)(**config).save_pretrained(folder)
    return folder / "scheduler_config.json"


def written(folder: Path, **values: Any) -> Path:
    file = folder / "scheduler_config.json"
    file.write_text(json.dumps(values))
    return file


@pytest.mark.parametrize("config", [{}, SCALED, {"beta_schedule": "squaredcos_cap_v2"}, {"trained_betas": [0.1, 0.2]}])
@pytest.mark.parametrize(
    "name", ["DDPMScheduler", "DDIMScheduler", "PNDMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"]
)
def test_the_schedule_of_noise_is_that_of_the_class_with_which_diffusers_trains(
    tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    found = read_scheduler(saved(tmp_path, name, **config, prediction_type="v_prediction"))
    expected = diffusers.DDPMScheduler.from_pretrained(tmp_path)
    assert (type(found), is_flow(found)) == (diffusers.DDPMScheduler, False)
    assert torch.equal(found.alphas_cumprod, expected.alphas_cumprod)
    assert found.config.prediction_type == "v_prediction"


@pytest.mark.parametrize("name", ["DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"])
def test_betas_may_end_without_signal(tmp_path: Path, name: str) -> None:
    found = read_scheduler(saved(tmp_path, name, **ZERO_SNR))
    assert torch.equal(found.alphas_cumprod, diffusers.DDPMScheduler.from_pretrained(tmp_path).alphas_cumprod)
    assert found.alphas_cumprod[-1] == 0


@pytest.mark.parametrize("name", ["CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"])
def test_a_schedule_with_keys_of_its_own_is_followed(tmp_path: Path, name: str) -> None:
    found = read_scheduler(saved(tmp_path, name, snr_shift_scale=3.0))
    assert torch.equal(found.alphas_cumprod, getattr(diffusers, name).from_pretrained(tmp_path).alphas_cumprod)
    assert not torch.equal(found.alphas_cumprod, diffusers.DDPMScheduler.from_pretrained(tmp_path).alphas_cumprod)


def test_keys_that_a_file_lacks_have_the_defaults_of_its_class(tmp_path: Path) -> None:
    found = read_scheduler(written(tmp_path, _class_name="UnCLIPScheduler"))
    expected = diffusers.UnCLIPScheduler()
    assert torch.allclose(found.alphas_cumprod, expected.alphas_cumprod, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "config", "shift"),
    [
        ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}, 3.0),
        ("FlowMatchHeunDiscreteScheduler", {"shift": 2.0}, 2.0),
        ("UniPCMultistepScheduler", {"prediction_type": "flow_prediction", "flow_shift": 5.0}, 5.0),
        (
            "DPMSolverMultistepScheduler",
            {"use_flow_sigmas": True, "flow_shift": 4.0, "prediction_type": "flow_prediction"},
            4.0,
        ),
        ("FlowMatchEulerDiscreteScheduler", {}, 1.0),
    ],
)
def test_samplers_of_velocities_bring_their_shift(tmp_path: Path, name: str, config: dict, shift: float) -> None:
    found = read_scheduler(saved(tmp_path, name, **config))
    assert is_flow(found)
    sigmas = shifted(torch.arange(1000, 0, -1) / 1000, shift)
    assert torch.equal(found.sigmas, sigmas)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "_class_name=None is no scheduler of diffusers"),
        ({"_class_name": "FluxPipeline"}, "_class_name=FluxPipeline is no scheduler of diffusers"),
        ({"_class_name": "DDPMScheduler", "beta_schedule": "odd"}, "DDPMScheduler cannot be made of it: odd is not"),
        ({"_class_name": "EDMEulerScheduler"}, "EDMEulerScheduler with prediction_type=epsilon: no task trains"),
        ({"_class_name": "SCMScheduler"}, "SCMScheduler with prediction_type=trigflow: no task trains"),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 10}, "num_train_timesteps=10: only"),
        (
            {"_class_name": "EulerDiscreteScheduler", "prediction_type": "v_prediction", "timestep_type": "continuous"},
            "EulerDiscreteScheduler with prediction_type=v_prediction timestep_type=continuous: no task trains",
        ),
        (
            {"_class_name": "DPMSolverMultistepScheduler", "use_flow_sigmas": True},
            "DPMSolverMultistepScheduler with prediction_type=epsilon use_flow_sigmas=True: no task trains",
        ),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    file = written(tmp_path, **values)
    with pytest.raises(ValueError, match=message) as caught:
        read_scheduler(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def pipeline(folder: Path, name: str, **config: Any) -> Path:
    file = saved(folder / "scheduler", "FlowMatchEulerDiscreteScheduler", use_dynamic_shifting=True, **config)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": name}))
    return file


@pytest.mark.parametrize("tokens", [16, 1024, 5000])
def test_pipelines_tell_the_shift_of_a_size(tmp_path: Path, tokens: int) -> None:
    from diffusers.pipelines.cogview4 import pipeline_cogview4
    from diffusers.pipelines.flux import pipeline_flux
    from diffusers.pipelines.flux2 import pipeline_flux2

    numbers = {"base_shift": 0.7, "max_shift": 2.05, "base_image_seq_len": 1024, "max_image_seq_len": 8192}
    for name, expected in {
        "FluxPipeline": pipeline_flux.calculate_shift(tokens, 1024, 8192, 0.7, 2.05),
        "LTXPipeline": pipeline_flux.calculate_shift(tokens, 1024, 8192, 0.7, 2.05),
        "CogView4Pipeline": pipeline_cogview4.calculate_shift(tokens, 1024, 0.7, 2.05),
        "Flux2Pipeline": pipeline_flux2.compute_empirical_mu(tokens, 50),
    }.items():
        file = pipeline(tmp_path / name, name, **numbers)
        assert shift_by_tokens(file, read_scheduler(file))(tokens) == expected


def test_without_a_pipeline_that_tells_there_is_an_error(tmp_path: Path) -> None:
    file = pipeline(tmp_path, "DDPMPipeline")
    with pytest.raises(ValueError, match=r"model_index.json: DDPMPipeline of diffusers .* does not tell how"):
        shift_by_tokens(file, read_scheduler(file))
    (tmp_path / "model_index.json").unlink()
    with pytest.raises(ValueError, match=r"use_dynamic_shifting: there is no model_index.json beside it"):
        shift_by_tokens(file, read_scheduler(file))


def test_a_sampler_has_the_numbers_of_training() -> None:
    schedule = diffusers.DDPMScheduler(**SCALED)
    made = of_config(library().DDIMScheduler, schedule.config, clip_sample=False)
    assert torch.equal(made.alphas_cumprod, schedule.alphas_cumprod)
    assert not made.config.clip_sample
