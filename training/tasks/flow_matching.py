"""flow_matching: learns the velocity that turns noise into images, and makes images with it.

Rectified flow (Liu, Gong, Liu 2022, "Flow Straight and Fast"): a point on the straight line between an image x and
noise n is (1 - t) x + t n, and the model predicts its velocity n - x. Times t are logit-normal, which trains most where
the prediction is hardest, and moved towards noise by the shift of the model's scheduler (Esser et al. 2024, "Scaling
Rectified Flow Transformers").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models.diffusion_scheduler import shift_by_tokens, shifted
from offload.knobs import in_range
from training.errors import UserError, as_user_error
from training.tasks.diffusion import NOISY, TARGET, TIMESTEP, Diffusion, Step

if TYPE_CHECKING:
    from models.diffusion_scheduler import TrainingScheduler


@dataclass(kw_only=True, eq=False)
class FlowMatching(Diffusion):
    """Trains `model(noisy, timestep, **condition) -> velocity`, and samples with Euler's method.

    `timestep` is float32 [B], from 0 (image) to 1 (noise).

    Args:
        timestep_mean: times are the sigmoid of normal numbers of this mean: above 0 more noise, below 0 less.
        timestep_std: their standard deviation.
        shift: how far times are then moved towards noise, s t / (1 + (s - 1) t); 1: not at all. null takes that of the
            scheduler, which may depend on the size of the image.

    Raises KnobError if a value is out of range.
    """

    name = "flow_matching"
    time_dtype = torch.float32
    sampled_by = "Euler's method"
    takes_velocities = True

    timestep_mean: float = 0.0
    timestep_std: float = 1.0
    shift: float | None = None

    def __post_init__(self):
        super().__post_init__()
        # At 10 nearly every time is within 1e-4 of 0 or 1.
        in_range("timestep_mean", self.timestep_mean, at_least=-10, at_most=10)
        in_range("timestep_std", self.timestep_std, at_least=0, at_most=10)
        if self.shift is not None:
            in_range("shift", self.shift, above=0, at_most=1000)
        self._shifted = _by(1.0 if self.shift is None else self.shift)

    def drawn(self, generator: torch.Generator) -> Tensor:
        return torch.randn((), generator=generator)

    def noised(self, images: Tensor, noise: Tensor, drawn: Tensor) -> dict[str, Tensor]:
        times = torch.sigmoid(drawn * self.timestep_std + self.timestep_mean)
        times = self._shifted(times, images.shape[1:])
        t = times.view(-1, *[1] * (images.ndim - 1))
        return {NOISY: (1 - t) * images + t * noise, TARGET: noise - images, TIMESTEP: times}

    def fit_scheduler(self, file: Path | None, scheduler: TrainingScheduler | None, model: nn.Module) -> dict[str, str]:
        if self.shift is not None or scheduler is None:
            return {}
        if not scheduler.config.use_dynamic_shifting:
            self._shifted = _by(scheduler.config.shift)
            return {"task.shift": f"{scheduler.config.shift:g}, that of {file}"}
        with as_user_error("task.shift=null: ", after=": give task.shift=NUMBER"):
            mu_of = shift_by_tokens(file, scheduler)
        tokens_of = getattr(model, "tokens", lambda shape: None)

        def by_tokens(times: Tensor, shape: Sequence[int]) -> Tensor:
            if (tokens := tokens_of(shape)) is None:
                raise UserError(
                    f"task.shift=null: {file} shifts times by the number of tokens, which are not known of this model:"
                    " give task.shift=NUMBER; diffusers' training scripts take 1, no shift"
                )
            return scheduler.time_shift(mu_of(tokens), 1.0, times)

        self._shifted = by_tokens
        return {"task.shift": f"by the number of an image's tokens, with the numbers of {file}"}

    def sampling(self, shape: Sequence[int]) -> Iterator[tuple[float, Step]]:
        # Computed on the CPU, so that every device takes the same steps.
        times = self._shifted(torch.linspace(1, 0, self.sample_steps + 1), shape).tolist()
        for time, following in pairwise(times):
            yield time, lambda points, velocity, length=following - time: points + length * velocity


def _by(shift: float) -> Callable[[Tensor, Sequence[int]], Tensor]:
    return lambda times, shape: shifted(times, shift)
