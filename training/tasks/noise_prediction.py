"""noise_prediction: learns to predict the noise in an image, v or the image, on the noise schedule of a scheduler.

Denoising diffusion (Ho et al. 2020; v: Salimans and Ho 2022), as diffusers' own training scripts compute it: steps are
uniform, and the loss is the mean squared error, by choice with min-SNR weights (Hang et al. 2023, "Efficient Diffusion
Training via Min-SNR Weighting Strategy").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from models.diffusion_scheduler import EPSILON, SAMPLE, V_PREDICTION, library, of_config
from offload.knobs import in_range
from training.errors import UserError
from training.tasks.diffusion import NOISY, TARGET, TIMESTEP, WEIGHT, Diffusion, Step

if TYPE_CHECKING:
    from diffusers import DDPMScheduler

    from models.diffusion_scheduler import TrainingScheduler


@dataclass(kw_only=True, eq=False)
class NoisePrediction(Diffusion):
    """Trains `model(noisy, timestep, **condition) -> prediction`, and samples with DDIM (Song et al. 2020).

    `timestep` is int64 [B], steps from 0 (image) to one below the scheduler's num_train_timesteps (noise). Its
    prediction_type tells what is predicted; without a scheduler it is the noise, on the schedule of Ho et al. 2020.

    Args:
        snr_gamma: examples count in the loss by the smaller of their ratio of signal to noise and this number, 5 in the
            paper; null: all alike.

    Raises KnobError if a value is out of range.
    """

    name = "noise_prediction"
    time_dtype = torch.int64
    sampled_by = "DDIM"
    takes_velocities = False

    snr_gamma: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.snr_gamma is not None:
            in_range("snr_gamma", self.snr_gamma, above=0, at_most=1_000_000)

    @cached_property
    def schedule(self) -> DDPMScheduler:
        return library().DDPMScheduler()

    def drawn(self, generator: torch.Generator) -> Tensor:
        return torch.randint(self.schedule.config.num_train_timesteps, (), generator=generator)

    def noised(self, images: Tensor, noise: Tensor, drawn: Tensor) -> dict[str, Tensor]:
        # The copy, because a scheduler keeps its numbers on the device that it was last called with.
        schedule, kind = copy(self.schedule), self.schedule.config.prediction_type
        made = {NOISY: schedule.add_noise(images, noise, drawn), TIMESTEP: drawn}
        if kind == V_PREDICTION:
            made[TARGET] = schedule.get_velocity(images, noise, drawn)
        else:
            made[TARGET] = images if kind == SAMPLE else noise
        if self.snr_gamma is not None:
            made[WEIGHT] = self._weight(drawn)
        return made

    def _weight(self, steps: Tensor) -> Tensor:
        """Returns the min-SNR weights, float32 [B]: the smaller of SNR and gamma, by what that is of each target."""
        snr = library().training_utils.compute_snr(self.schedule, steps)
        least, kind = snr.clamp(max=self.snr_gamma), self.schedule.config.prediction_type
        if kind == EPSILON:
            # Where there is no signal, that is 0 / 0.
            return (least / snr).nan_to_num(1.0)
        return least / (snr + 1) if kind == V_PREDICTION else least

    def check_model(self, config: DictConfig, model: nn.Module) -> None:
        super().check_model(config, model)
        if not getattr(model, "takes_steps", True):
            raise UserError(
                "task=noise_prediction: the model takes times from 0 to 1, and no whole steps: take task=flow_matching"
            )

    def fit_scheduler(self, file: Path | None, scheduler: TrainingScheduler | None, model: nn.Module) -> dict[str, str]:
        if scheduler is not None:
            self.schedule = scheduler
        config = self.schedule.config
        if self.sample_steps > config.num_train_timesteps:
            raise UserError(
                f"task.sample_steps={self.sample_steps}: must be at most {config.num_train_timesteps}, the steps of the"
                " scheduler"
            )
        why = "that of the task, because there is no scheduler" if file is None else f"that of {file}"
        numbers = f"{config.prediction_type}, {config.num_train_timesteps} steps, {config.beta_schedule} betas"
        return {"task.scheduler": f"{numbers}: {why}"}

    def sampling(self, shape: Sequence[int]) -> Iterator[tuple[int, Step]]:
        sampler = of_config(library().DDIMScheduler, self.schedule.config)
        sampler.set_timesteps(self.sample_steps)
        for time in sampler.timesteps.tolist():
            yield time, lambda points, predicted, time=time: sampler.step(predicted, time, points).prev_sample
