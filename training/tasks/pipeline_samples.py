"""Pictures that a pipeline makes of prompts: the samples of model=pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from models.pipelines.model import PipelineModel
from models.pipelines.sampling import PipelineSampler
from training.errors import UserError
from training.tasks.sample import ImageSample, grid_of, to_uint8
from training.tasks.task import Sampler


@dataclass
class PipelineSamples(Sampler):
    """Makes a picture of each of `sample.prompts`, with what the pipeline's text encoders made of them."""

    prompts: Mapping[str, list[Any]]
    size: tuple[int, int]
    steps: int
    seed: int
    sampler: PipelineSampler | None = None

    @classmethod
    def of(cls, config: DictConfig, model: PipelineModel, steps: int) -> PipelineSamples:
        """Returns the sampler of a run. Raises UserError without prompts, or where they are not encoded yet."""
        given = f"sample.every={config.sample.every}"
        if not config.sample.prompts:
            raise UserError(f"{given}: give sample.prompts=['a cat', 'a dog'], of which pictures are made")
        folder = model.encoded()
        encoded = {prompt: folder.prompt_of(prompt) for prompt in config.sample.prompts}
        if missing := [prompt for prompt, found in encoded.items() if found is None]:
            raise UserError(f"{given}: sample.prompts has '{missing[0]}', which is encoded with dataset=captioned only")
        return cls(encoded, sample_size(config), steps, config.seed)

    def sample(self, model: nn.Module, device: torch.device, stopped: Callable[[], bool]) -> ImageSample | None:
        if self.sampler is None:
            self.sampler = PipelineSampler(model.folder, model.network, model.network.dtype, device)
        pictures = []
        for number, (prompt, encoded) in enumerate(self.prompts.items()):
            made = self.sampler.picture(prompt, encoded, self.size, self.steps, self.seed + number, stopped)
            if made is None:
                return None
            pictures.append(made)
        images = torch.stack(pictures)
        if not images.isfinite().all():
            raise ValueError("the model's predictions are not finite")
        return ImageSample(grid_of(to_uint8(images)), " | ".join(self.prompts))


def sample_size(config: DictConfig) -> tuple[int, int]:
    """Returns height and width of a sample: those of a square of the dataset's pixels."""
    multiple = config.dataset.multiple
    edge = max(config.dataset.size // multiple, 1) * multiple
    return edge, edge
