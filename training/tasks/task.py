"""The interface of a task. The loop, the plan and the evaluation know batches through it only."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from training.batches import Batch, examples_in, tokens_in, trained_tokens_in
from training.errors import UserError
from training.tasks.sample import Sample


class Sampler(ABC):
    """Makes samples of one run: of the same prompt and the same random numbers each time."""

    @abstractmethod
    def sample(self, model: nn.Module, device: torch.device, stopped: Callable[[], bool]) -> Sample | None:
        """Returns a sample of the model, which is in eval(); None once `stopped`.

        Raises ValueError if the model's output is not finite.
        """


class Task(ABC):
    """A training objective: it defines batches, their loss, and samples.

    A batch comes from the dataset: a tensor, or a dictionary of tensors, whose first dimension counts the examples.
    """

    unit: ClassVar[str] = "examples"
    """the name of the things that speeds and totals count: tokens, images"""
    figures: ClassVar[tuple[str, ...]] = ()
    """the names of what a logged step shows beside its loss, as metrics train/NAME"""
    score_names: ClassVar[tuple[str, ...]] = ("loss",)
    """the names of the `scores`, of which checkpoint.best may be one"""
    looks_ahead: bool = False
    """True if batches need what `ahead` adds"""
    needs_table: bool = False
    """True if `prepared` looks up what the model gives every sample before the first step"""
    needs_copy: bool = False
    """True if the model that `ahead` is given is a second one, frozen, in its `reference_model` too"""
    reference_model: nn.Module | None = None
    """that one, while it has memory"""
    files: Sequence[Path] = ()
    """those of the model that `fit` followed, such as a scheduler's"""

    @property
    def files_sha256(self) -> str:
        """The SHA-256 of the contents of `files`."""
        return hashlib.sha256(b"\n".join(file.read_bytes() for file in self.files)).hexdigest()

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the loss of a microbatch, which is on the model's device: a scalar, the mean over its `weight`."""

    def prepared(self, batch: Batch, seed: int) -> Batch:
        """Returns the batch, on the CPU, with a step's random numbers (timesteps, noise) added: a pure function."""
        return batch

    def ahead(self, model: nn.Module, batch: Batch) -> Batch:
        """Adds to a microbatch, on the device, what the model computes of it before the step: without gradients, in
        eval(), while no other microbatch is under way.
        """
        return batch

    def loss_and_figures(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns the loss and the `figures`, detached scalars, which are means over the `weight` too."""
        return self.loss(model, batch), ()

    def weight(self, batch: Batch) -> int:
        """Returns the weight of a `prepared` batch, on the CPU, in the mean loss of a step; 0: it counts nothing.

        It is the number of labelled tokens if `labels` in a dictionary have two dimensions or more, else the number of
        examples.
        """
        labels = batch.get("labels") if isinstance(batch, dict) else None
        return examples_in(batch) if labels is None or labels.ndim < 2 else trained_tokens_in(labels)

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Returns what an evaluation measures: means over the `weight`, scalars. `loss` is among them."""
        return {"loss": self.loss(model, batch)}

    def units(self, config: DictConfig) -> int:
        """Returns how many of `unit` a step trains on, as a plan expects: without padding."""
        return config.batch_size

    def units_in(self, batch: Batch) -> int:
        """Returns how many of `unit` are in a batch of the dataset, on the CPU: padding is none of them."""
        return tokens_in(batch) if self.unit == "tokens" else examples_in(batch)

    def microbatches(self, config: DictConfig) -> int:
        """Returns the number of microbatches at microbatches=auto: between 1 and `batch_size`."""
        return 1

    def flops(self, model: nn.Module, config: DictConfig) -> float | None:
        """Returns the FLOPs of a step without recompute, three forwards (Chowdhery et al. 2022); None: not known."""
        return None

    def meta_batch(self, config: DictConfig, examples: int) -> Batch:
        """Returns a prepared batch of `examples` examples on the meta device, from the configuration without data.

        Raises UserError if the dataset does not fit the task.
        """
        dataset = get_class(config.dataset._target_)
        if not hasattr(dataset, "meta_batch"):
            raise UserError(
                f"dataset={dataset.__name__}: {type(self).__name__} needs images; this dataset has none: choose another"
                " dataset or another task"
            )
        keys = OmegaConf.to_container(config.dataset, resolve=True)
        batch = dataset.meta_batch(examples, **{key: keys[key] for key in keys if not key.startswith("_")})
        return self.prepared(batch, 0)

    def check_model(self, config: DictConfig, model: nn.Module) -> None:
        """Raises UserError if the model, on the meta device, does not fit task or configuration. Plans call it, too."""
        return

    def fit(self, config: DictConfig, model: nn.Module) -> dict[str, str]:
        """Sets what the files of the model prescribe for the task, such as a scheduler.

        Returns for each such key a line for the plan, with the value and the reason. Raises UserError for a file that
        does not fit the task.
        """
        return {}

    def check(self, config: DictConfig, dataset: object, model: nn.Module) -> None:
        """Raises UserError if the dataset does not fit this task, or not the model, which `check_model` has seen."""
        return

    def sample_forwards(self, config: DictConfig, model: nn.Module) -> Sequence[Callable[[], object]]:
        """Returns forwards that need as much memory as a sample, for a plan: the model is on the meta device."""
        return ()

    def sampler(self, config: DictConfig, model: nn.Module) -> Sampler:
        """Makes what generates samples. Raises UserError if the task, the model or the dataset has none."""
        raise UserError(f"sample.every={config.sample.every}: {type(self).__name__} has no samples: take null")


def loss_to_train(task: Task, model: nn.Module, batch: Batch) -> Tensor:
    """Returns `task.loss`. Raises UserError as `loss_and_figures_to_train` does."""
    return loss_and_figures_to_train(task, model, batch)[0]


def loss_and_figures_to_train(task: Task, model: nn.Module, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
    """Returns `task.loss_and_figures`. Raises UserError if the loss depends on no parameter that trains."""
    loss, figures = task.loss_and_figures(model, batch)
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UserError(
            "the loss depends on no parameter that trains: the forward does not use those that do; with an adapter,"
            " take other layers in adapter.targets"
        )
    return loss, figures


def refuse_language_model(model: nn.Module, task: str, advice: str) -> None:
    """Raises UserError for a model of text in a task of images; `advice` names others."""
    if hasattr(model, "vocab_size"):
        raise UserError(f"task={task}: {type(model).__name__} is a language model: take one of images ({advice})")
