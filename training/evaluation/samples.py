"""Samples that the model makes between steps: under the run's offload mode, and without a trace in its training."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from omegaconf import DictConfig
from torch import nn

from training.config.schema import due
from training.evaluation.held_out import observed
from training.tasks.sample import Sample
from training.tasks.task import Sampler, Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Samples:
    """The samples that a run makes; `sampler` is None if it makes none."""

    config: DictConfig
    sampler: Sampler | None

    @classmethod
    def of(cls, config: DictConfig, task: Task, model: nn.Module) -> Self:
        """Raises UserError if the run is to sample, and its task, model or dataset does not allow it."""
        return cls(config, None if config.sample.every is None else task.sampler(config, model))

    def due(self, step: int) -> bool:
        """Tells whether to sample after `step` steps: every `sample.every`, from 0, and after the last."""
        return due(self.config.sample.every, step, self.config.steps)

    def sample(self, model: nn.Module, device: torch.device, stopped: Callable[[], bool]) -> Sample | None:
        """Makes a sample. Returns None once `stopped` returns True, and, with a warning, if it is not finite."""
        try:
            with observed(model, self.config.seed, device):
                return self.sampler.sample(model, device, stopped)
        except ValueError as error:
            logger.warning("no sample: %s", error)
            return None
