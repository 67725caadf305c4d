"""Pictures that a pipeline makes of prompts: the samples of model=pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from models.pipelines.encoded import EncodedFolder
from models.pipelines.model import PipelineModel
from models.pipelines.sampling import PipelineSampler
from training.errors import UserError
from training.tasks.sample import ImageSample, grid_of, to_uint8
from training.tasks.task import Sampler
from training.weights.source import scheduler_given


@dataclass
class PipelineSamples(Sampler):
    """Makes a picture of each of `sample.prompts`, with what the pipeline's text encoders made of them."""

    prompts: tuple[str, ...]
    encoded: EncodedFolder
    size: tuple[int, int]
    steps: int
    seed: int
    scheduler: Path | None
    sampler: PipelineSampler | None = None

    @classmethod
    def of(cls, config: DictConfig, model: PipelineModel, steps: int) -> PipelineSamples:
        """Returns the sampler of a run, which encodes the prompts before. Raises UserError without any."""
        given = f"sample.every={config.sample.every}"
        if not config.sample.prompts:
            raise UserError(f"{given}: give sample.prompts=['a cat', 'a dog'], of which pictures are made")
        scheduler = scheduler_given(config.task.scheduler, config.model)
        return cls(tuple(config.sample.prompts), model.encoded(), sample_size(config), steps, config.seed, scheduler)

    def sample(self, model: nn.Module, device: torch.device, stopped: Callable[[], bool]) -> ImageSample | None:
        pictures = self.pictures(model, device, stopped)
        return None if pictures is None else ImageSample(grid_of(pictures), " | ".join(self.prompts))

    def pictures(self, model: nn.Module, device: torch.device, stopped: Callable[[], bool]) -> Tensor | None:
        """Returns the pictures of all prompts, uint8 [n, height, width, 3], or as `sample`."""
        if self.sampler is None:
            parts = model.folder, model.network, model.network.dtype
            self.sampler = PipelineSampler(*parts, device, self.scheduler)
        pictures = []
        for number, prompt in enumerate(self.prompts):
            encoded = self.encoded.prompt_of(prompt)
            made = self.sampler.picture(prompt, encoded, self.size, self.steps, self.seed + number, stopped)
            if made is None:
                return None
            pictures.append(made)
        images = torch.stack(pictures)
        if not images.isfinite().all():
            raise ValueError("the model's predictions are not finite")
        return to_uint8(images)


def sample_size(config: DictConfig) -> tuple[int, int]:
    """Returns height and width of a sample: those of a square of the dataset's pixels."""
    multiple = config.dataset.multiple
    edge = max(config.dataset.size // multiple, 1) * multiple
    return edge, edge
