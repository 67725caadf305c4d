"""Noise prediction: its loss against a loop as in diffusers' training scripts, on the same files; its samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers.training_utils import compute_snr
from omegaconf import OmegaConf
from torch import Tensor, nn

from offload import KnobError
from tests.models.helpers.small_diffusion import inputs_of, small
from tests.models.test_diffusion_scheduler import SCALED, ZERO_SNR, saved
from training.data.packing import random_words
from training.errors import UserError
from training.tasks.noise_prediction import NoisePrediction

Script = tuple[Tensor, Tensor]


def fitted(folder: Path, name: str, config: dict[str, Any], **keys: Any) -> NoisePrediction:
    """A task without dropping that has read the scheduler of a folder."""
    saved(folder / "scheduler", name, **config)
    task = NoisePrediction(scheduler=str(folder), drop_condition=0, **keys)
    task.fit(OmegaConf.create({"model": {"weights": None}}), nn.Linear(1, 1))
    return task


def drawn(images: Tensor, seed: int, draw: Callable[[torch.Generator], Tensor]) -> tuple[Tensor, Tensor]:
    """Noise and times of a seed, drawn example by example."""
    noise, times = torch.empty_like(images), []
    for example, word in enumerate(random_words(len(images), seed)):
        generator = torch.Generator().manual_seed(int(word) & 0x7FFF_FFFF_FFFF_FFFF)
        times.append(draw(generator))
        torch.rand((), generator=generator)
        noise[example].normal_(generator=generator)
    return noise, torch.stack(times)


def loss_of_script(
    folder: Path, images: Tensor, seed: int, gamma: float | None, call: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The loss of train_text_to_image.py of diffusers, with its scheduler and the model's own call."""
    scheduler = diffusers.DDPMScheduler.from_pretrained(folder, subfolder="scheduler")
    steps = scheduler.config.num_train_timesteps
    noise, times = drawn(images, seed, lambda generator: torch.randint(0, steps, (), generator=generator))
    predicted = call(scheduler.add_noise(images, noise, times), times)
    kind = scheduler.config.prediction_type
    target = noise if kind == "epsilon" else scheduler.get_velocity(images, noise, times)
    if gamma is None:
        return F.mse_loss(predicted.float(), target.float(), reduction="mean")
    snr = compute_snr(scheduler, times)
    weights = torch.stack([snr, gamma * torch.ones_like(times)], dim=1).min(dim=1)[0]
    weights = weights / (snr if kind == "epsilon" else snr + 1)
    loss = F.mse_loss(predicted.float(), target.float(), reduction="none")
    return (loss.mean(dim=list(range(1, loss.ndim))) * weights).mean()


def sdxl(network: nn.Module, given: dict[str, Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    added = {key: given[key] for key in ("text_embeds", "time_ids")}
    return lambda noisy, times: network(noisy, times, given["encoder_hidden_states"], added_cond_kwargs=added).sample


def with_variance(network: nn.Module, given: dict[str, Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    # As train_pixart of diffusers: the other half is a variance.
    return lambda noisy, times: network(noisy, times, given["encoder_hidden_states"]).sample.chunk(2, 1)[0]


CALLS = {
    "unet": lambda network, given: lambda noisy, times: network(noisy, times, given["labels"]).sample,
    "dit": lambda network, given: lambda noisy, times: network(noisy, times, given["labels"]).sample,
    "sdxl": sdxl,
    "text_unet": with_variance,
}


@pytest.mark.sampled
@pytest.mark.parametrize("gamma", [None, 5.0])
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("EulerDiscreteScheduler", {**SCALED, "timestep_spacing": "leading", "steps_offset": 1}),
        ("DDIMScheduler", ZERO_SNR),
        ("DPMSolverMultistepScheduler", {"prediction_type": "v_prediction", "num_train_timesteps": 500}),
    ],
)
@pytest.mark.parametrize("model", CALLS)
def test_the_loss_is_that_of_the_training_scripts(
    tmp_path: Path, model: str, name: str, config: dict[str, Any], gamma: float | None
) -> None:
    changes = {"out_channels": 8} if CALLS[model] is with_variance else {}
    task, own = fitted(tmp_path, name, config, snr_gamma=gamma), small(model, **changes)
    images, condition = inputs_of(model)
    for seed in range(4):
        expected = loss_of_script(tmp_path, images, seed, gamma, CALLS[model](own.network, condition))
        assert torch.equal(task.loss(own, task.prepared({"images": images, **condition}, seed)), expected)


def test_a_model_of_images_learns_images(tmp_path: Path) -> None:
    task = fitted(tmp_path, "UnCLIPScheduler", {"prediction_type": "sample"})
    images = torch.randn(2, 1, 4, 4)
    assert torch.equal(task.prepared({"images": images}, 0)["target"], images)
    weights = fitted(tmp_path, "UnCLIPScheduler", {"prediction_type": "sample"}, snr_gamma=2.0)._weight
    snr = compute_snr(task.schedule, torch.arange(1000))
    assert torch.equal(weights(torch.arange(1000)), snr.clamp(max=2))


def test_the_largest_gamma_is_the_weight_of_train_unconditional(tmp_path: Path) -> None:
    weights = fitted(tmp_path, "DDPMScheduler", {"prediction_type": "sample"}, snr_gamma=1_000_000)._weight
    alphas = diffusers.DDPMScheduler().alphas_cumprod
    torch.testing.assert_close(weights(torch.arange(1000)), alphas / (1 - alphas), rtol=1e-4, atol=0)


def test_noise_without_signal_has_a_weight(tmp_path: Path) -> None:
    task = fitted(tmp_path, "DDIMScheduler", {**ZERO_SNR, "prediction_type": "epsilon"}, snr_gamma=5.0)
    assert task._weight(torch.tensor([999, 0])).tolist()[0] == 1


def test_steps_are_uniform_and_noise_is_normal() -> None:
    prepared = NoisePrediction().prepared({"images": torch.zeros(4000, 1, 1, 1)}, 0)
    steps = prepared["timestep"]
    assert (steps.dtype, steps.min().item() < 5, steps.max().item() > 994) == (torch.int64, True, True)
    assert steps.float().mean().item() == pytest.approx(499.5, abs=15)
    assert prepared["target"].std().item() == pytest.approx(1, abs=0.04)


def test_a_plan_leaves_the_numbers_of_the_scheduler_where_they_are() -> None:
    task = NoisePrediction(snr_gamma=5.0)
    meta = task.prepared({"images": torch.empty(2, 1, 4, 4, device="meta")}, 0)
    real = task.prepared({"images": torch.zeros(2, 1, 4, 4)}, 0)
    assert {k: (v.shape, v.dtype) for k, v in real.items()} == {k: (v.shape, v.dtype) for k, v in meta.items()}
    assert all(tensor.is_meta for tensor in meta.values())
    assert task.schedule.alphas_cumprod.device.type == "cpu"


class Knows(nn.Module):
    """Predicts the noise of the only image that it knows."""

    sample_shape = (1, 4, 4)

    def __init__(self, task: NoisePrediction, image: float):
        super().__init__()
        self.alphas, self.image, self.times = task.schedule.alphas_cumprod, image, []

    def forward(self, noisy: Tensor, timestep: Tensor) -> Tensor:
        assert timestep.dtype == torch.int64
        self.times.append(timestep[0].item())
        alphas = self.alphas[timestep].view(-1, 1, 1, 1)
        return (noisy - alphas.sqrt() * self.image) / (1 - alphas).sqrt()


def test_samples_reach_the_image_by_the_steps_of_the_librarys_sampler() -> None:
    task = NoisePrediction(sample_count=2, sample_steps=10)
    model = Knows(task, 0.5)
    images = task.images(model, 0, "cpu")
    assert set(images.unique().tolist()) <= {190, 191, 192}
    expected = diffusers.DDIMScheduler()
    expected.set_timesteps(10)
    assert model.times == expected.timesteps.tolist()


def test_a_sample_has_no_more_steps_than_the_schedule(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^task.sample_steps=600: must be at most 500, the steps of the scheduler"):
        fitted(tmp_path, "DDPMScheduler", {"num_train_timesteps": 500}, sample_steps=600)


def test_a_model_without_whole_steps_is_refused() -> None:
    with pytest.raises(UserError, match=r"takes times from 0 to 1, and no whole steps: take task=flow_matching"):
        NoisePrediction().check_model(None, small("flux"))
    NoisePrediction().check_model(None, small("dit"))


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_values_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(KnobError, match=r"^snr_gamma="):
        NoisePrediction(snr_gamma=value)
