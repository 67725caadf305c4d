"""Parts that tasks of diffusion models share: noise, conditions and their dropping, the loss, samples, the scheduler.

A task says how an image becomes a noisy one and what the model is to predict of it. Noise is drawn and added on the
CPU. The condition is dropped for some examples, so that the same model also predicts without it, as classifier-free
guidance needs (Ho and Salimans 2022).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from models.diffusion_classes import OTHER_LATENTS
from models.diffusion_files import pipeline_of
from models.diffusion_scheduler import ADVICE, is_flow, read_scheduler
from models.json_files import read_object
from models.pipelines.calls import ASKED
from models.pipelines.model import PipelineModel
from offload import KnobError
from offload.knobs import in_range
from training.batches import Batch
from training.config.declare import AUTO
from training.data.packing import random_words
from training.data.pictures import LOSS_MASK
from training.errors import UserError, as_user_error
from training.tasks.pipeline_samples import PipelineSamples
from training.tasks.sample import ImageSample, grid_of, to_uint8
from training.tasks.task import Sampler, Task, refuse_language_model
from training.weights.source import SCHEDULER, scheduler_given

if TYPE_CHECKING:
    from models.diffusion_scheduler import TrainingScheduler

IMAGES, LABELS = "images", "labels"
# What `prepared` adds.
NOISY, TARGET, TIMESTEP, WEIGHT = "noisy", "target", "timestep", "loss_weight"
# Facts about sizes, and latents that the model continues or fills, which it is always told.
NEVER_DROPPED = ("time_ids", OTHER_LATENTS)
UNUSED_BY_PIPELINES = ("null_class", "drop_condition", "guidance", "sample_count", "sample_shape")
# In the key of random numbers: those of the samples.
SAMPLING = 1
# A step of a sampler: from points and the prediction for them to the next points.
Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(kw_only=True, eq=False)
class Diffusion(Task):
    """Trains `model(noisy, timestep, **condition) -> prediction`, and samples with it.

    A batch has `images`, floating point [B, C, H, W] (or a video's or latents' [B, C, ...]). Its other tensors are the
    condition: `labels`, int64 [B], or embeddings of any names. `noisy` and the prediction have the shape of the images,
    `noisy` is float32, and `timestep` is [B].

    A dropped label becomes `null_class`; every other dropped tensor becomes zeros.

    Args:
        scheduler: the scheduler_config.json, or its folder or pipeline, that says what the model predicts and at which
            times. auto takes that of the pipeline of the weights or of model.source; null the default of the task.
        null_class: the label that stands for no label, the number of classes; null for images without labels.
        drop_condition: the probability that an example is trained without its condition.
        sample_steps: steps from noise to image.
        guidance: how far to go from the prediction without label to that with the label; 1 takes that with the label
            as it is, and so does drop_condition=0, with which no model learns to predict without.
        sample_count: images in a sample. Image k has label k modulo the number of classes.
        sample_shape: [channels, height, width] of a sampled image; null asks the model.

    Raises KnobError if a value is out of range.
    """

    unit = "images"
    name: ClassVar[str]
    """its option in the configuration"""
    time_dtype: ClassVar[torch.dtype]
    """that of `timestep`"""
    takes_velocities: ClassVar[bool]
    """whether the model predicts velocities, as a scheduler of flow matching says"""
    sampled_by: ClassVar[str]
    """the name of the sampler, in captions"""

    scheduler: str | None = AUTO
    null_class: int | None = None
    drop_condition: float = 0.1
    sample_steps: int = 25
    guidance: float = 2.0
    sample_count: int = 16
    sample_shape: tuple[int, int, int] | None = None

    def __post_init__(self):
        if self.null_class is not None:
            in_range("null_class", self.null_class, at_least=1)
        in_range("drop_condition", self.drop_condition, at_least=0, at_most=1)
        in_range("sample_steps", self.sample_steps, at_least=1)
        in_range("guidance", self.guidance, at_least=0)
        in_range("sample_count", self.sample_count, at_least=1)
        shape = self.sample_shape
        if shape is not None and (len(shape) != 3 or not all(size >= 1 for size in shape)):
            raise KnobError("sample_shape", list(shape), "must be [channels, height, width]")
        self.sample_shape = None if shape is None else tuple(shape)

    @abstractmethod
    def drawn(self, generator: torch.Generator) -> Tensor:
        """Draws the time of one example: a scalar, which `noised` is given for the whole batch."""

    @abstractmethod
    def noised(self, images: Tensor, noise: Tensor, drawn: Tensor) -> dict[str, Tensor]:
        """Returns `noisy`, `target` (float32, as `images` and `noise` are) and `timestep`, and `loss_weight` or not.

        All tensors may be on the meta device.
        """

    @abstractmethod
    def sampling(self, shape: Sequence[int]) -> Iterator[tuple[float, Step]]:
        """Yields the times of a sample, as the model takes them, each with the step from there; `shape` is [C, ...]."""

    @abstractmethod
    def fit_scheduler(self, file: Path | None, scheduler: TrainingScheduler | None, model: nn.Module) -> dict[str, str]:
        """Takes over a scheduler of the model's kind; None: there is none. Returns and raises as `fit`."""

    def prepared(self, batch: Batch, seed: int) -> Batch:
        """Returns the batch with what `noised` makes in the place of `images`, and with dropped conditions.

        The numbers of example k depend on `seed` and k alone. A batch on the meta device gets meta tensors.

        Raises KnobError if labels are to be dropped, and there is no `null_class`.
        """
        if not isinstance(batch, dict) or IMAGES not in batch or not batch[IMAGES].is_floating_point():
            raise ValueError(
                f"task={self.name} needs a batch with `images` in floating point: choose a dataset of images"
            )
        images = batch[IMAGES]
        condition = _condition_of(batch)
        if LABELS in condition and self.drop_condition and self.null_class is None:
            advice = "the dataset has labels: give the number of classes, take drop_condition=0, or a dataset without"
            raise KnobError("null_class", None, f"{advice} (dataset.labels=false)")
        # `empty_like` would take over the layout of the images in memory, which may be any.
        noise = torch.empty(images.shape, device=images.device)
        uniform, drawn = torch.empty(len(images)), []
        for example, generator in enumerate(_generators(len(images), seed)):
            drawn.append(self.drawn(generator))
            uniform[example] = torch.rand((), generator=generator)
            if not images.is_meta:
                noise[example].normal_(generator=generator)
        dropped = (uniform < self.drop_condition).to(images.device)
        made = self.noised(images.float(), noise, torch.stack(drawn).to(images.device))
        kept = {LOSS_MASK: batch[LOSS_MASK]} if LOSS_MASK in batch else {}
        return {**made, **kept, **condition, **self._without(condition, dropped)}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean squared error of a prepared batch, by example times its `loss_weight`: float32, a scalar.

        With `loss_mask`, [B, height, width], that of an example is a mean over its pixels with these weights.

        Raises UserError if the model has no embedding for the label that stands for none, or its output another shape.
        """
        self._check_labels(model, LABELS in batch)
        target = batch[TARGET]
        predicted = model(batch[NOISY], batch[TIMESTEP], **_condition_of(batch))
        if predicted.shape != target.shape:
            # Torch would repeat the smaller one, and the loss would mean nothing.
            raise UserError(
                f"task={self.name}: the model returns {list(predicted.shape)} for images {list(target.shape)}: choose"
                " a model with as many channels out as in"
            )
        if WEIGHT not in batch and LOSS_MASK not in batch:
            return F.mse_loss(predicted.float(), target)
        each, dims = F.mse_loss(predicted.float(), target, reduction="none"), list(range(1, target.ndim))
        if LOSS_MASK in batch:
            mask = batch[LOSS_MASK]
            mask = mask.view(len(mask), *[1] * (target.ndim - 3), *mask.shape[1:]).expand_as(each)
            each = (each * mask).sum(dims) / mask.sum(dims)
        else:
            each = each.mean(dims)
        return (each * batch.get(WEIGHT, 1.0)).mean()

    def check_model(self, config: DictConfig, model: nn.Module) -> None:
        refuse_language_model(model, self.name, "model=unet_small, or model=diffusers")
        if not isinstance(model, PipelineModel):
            return
        if "pipeline" not in config.dataset:
            raise UserError("model=pipeline trains on captioned pictures: take dataset=captioned dataset.folder=DIR")
        for name in UNUSED_BY_PIPELINES:
            if (given := getattr(self, name)) != getattr(type(self), name):
                raise UserError(
                    f"task.{name}={given}: has no effect with model=pipeline: leave it out; dataset.caption_dropout"
                    " drops captions, and samples are the pipeline's own, one of each of sample.prompts"
                )

    def fit(self, config: DictConfig, model: nn.Module) -> dict[str, str]:
        """Reads the scheduler. Raises UserError if it is of another task, or there is none for pretrained weights.

        Raises it too for a UNet of latents, because no dataset has these.
        """
        file = scheduler_given(self.scheduler, config.model)
        if file is None:
            return self.fit_scheduler(None, None, model)
        self.files = tuple(filter(None, (file, index := pipeline_of(file))))
        with as_user_error(f"{SCHEDULER}={self.scheduler}: ", after=f"; or take {SCHEDULER}=null"):
            scheduler, parts = read_scheduler(file), {} if index is None else read_object(index, ADVICE)
        if type(getattr(model, "network", None)).__name__ == "UNet2DModel" and (coders := {"vae", "vqvae"} & {*parts}):
            # With three channels, as pictures have them, pictures would pass for latents.
            found = f"the model takes latents of the {coders.pop()} in {index}"
            raise UserError(f"task={self.name}: {found}: take another model")
        if is_flow(scheduler) != self.takes_velocities:
            predicts = "velocities" if is_flow(scheduler) else scheduler.config.prediction_type
            other = "flow_matching" if is_flow(scheduler) else "noise_prediction"
            or_none = "" if config.model.get("weights") else f", or {SCHEDULER}=null for weights from the seed"
            raise UserError(
                f"task={self.name}: {file} belongs to a model that predicts {predicts}: take task={other}{or_none}"
            )
        return self.fit_scheduler(file, scheduler, model)

    def check(self, config: DictConfig, dataset: object, model: nn.Module) -> None:
        """Raises UserError if the dataset has no images, or not the conditions that the model takes."""
        if not hasattr(type(dataset), "meta_batch"):
            raise UserError(f"task={self.name}: the dataset has no images: take dataset=glyphs or images")
        shapes = getattr(model, "condition_shapes", None)
        if (num_classes := getattr(dataset, "num_classes", None)) is not None:
            self._check_classes(num_classes, model, shapes)
        if shapes is None:
            return
        given = _condition_of(self.meta_batch(config, 1))
        if missing := [name for name in shapes if name not in given]:
            raise UserError(
                f"task={self.name}: the model needs {', '.join(missing)}, which the dataset has not: choose another"
                " dataset; random numbers are in dataset=synthetic_images, for its key condition or num_classes"
            )
        optional = getattr(model, "optional_conditions", None)
        if optional is not None and (unknown := [name for name in given if name not in (*shapes, *optional)]):
            raise UserError(
                f"task={self.name}: the dataset has {', '.join(unknown)}, which the model cannot use; it takes"
                f" {', '.join([*shapes, *optional]) or 'no condition'}: take a dataset without, or another model"
            )

    def _check_classes(self, num_classes: int, model: nn.Module, shapes: Mapping[str, object] | None) -> None:
        if shapes is not None and LABELS not in shapes:
            raise UserError(
                f"task={self.name}: the dataset has labels, and the model takes none: take a dataset without"
                " (dataset.labels=false), or a model with embeddings of classes"
            )
        if self.drop_condition and self.null_class is None:
            raise UserError(
                f"task.null_class=null: the label that stands for none: take task.null_class={num_classes}, the number"
                " of classes, or task.drop_condition=0"
            )
        if self.null_class is not None and self.null_class < num_classes:
            raise UserError(
                f"task.null_class={self.null_class}: a class of the dataset, which has {num_classes}: take"
                f" task.null_class={num_classes}"
            )
        self._check_labels(model, True)
        known = getattr(model, "num_labels", None)
        if known is not None and num_classes > known:
            raise UserError(
                f"task={self.name}: the dataset has {num_classes} classes, and the model has embeddings for {known}"
                " labels: give it more, or take another dataset"
            )

    def sample_forwards(self, config: DictConfig, model: nn.Module) -> Sequence[Callable[[], object]]:
        shape = self.sample_shape or getattr(model, "sample_shape", None)
        if shape is None:
            return ()
        points, labels = torch.empty(self.sample_count, *shape, device="meta"), None
        if self._takes_labels(model):
            labels = torch.empty(self.sample_count, dtype=torch.int64, device="meta")
        return (lambda: self._predicted(model, points, 1, labels),)

    def sampler(self, config: DictConfig, model: nn.Module) -> ImageSampler:
        """Makes the sampler of a run. Raises UserError for a model that makes no images, or not from labels alone."""
        if isinstance(model, PipelineModel):
            return PipelineSamples.of(config, model, self.sample_steps)
        shape = self.sample_shape or getattr(model, "sample_shape", None)
        given = f"sample.every={config.sample.every}"
        if shape is None:
            raise UserError(f"{given}: the size of images is unknown: give task.sample_shape=[CHANNELS,HEIGHT,WIDTH]")
        if len(shape) != 3 or shape[0] not in (1, 3):
            raise UserError(
                f"{given}: the model makes tensors of shape {list(shape)}, which are no pictures of 1 or 3 channels:"
                " take sample.every=null"
            )
        shapes = getattr(model, "condition_shapes", {})
        if LABELS in shapes and self.null_class is None:
            raise UserError(f"{given}: the model takes labels: give their number, as task.null_class")
        needed = [name for name in shapes if name != LABELS]
        if needed:
            raise UserError(
                f"{given}: the model is conditioned on {', '.join(needed)}, and samples are made from labels alone:"
                " take sample.every=null"
            )
        return ImageSampler(self, config.seed)

    def images(
        self,
        model: nn.Module,
        seed: int,
        device: torch.device | str,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Tensor | None:
        """Makes `sample_count` images: uint8 [count, height, width, channels] on the CPU.

        The noise of image k depends on `seed` and k alone. With guidance both predictions are made in one call. Call it
        with the model in eval() and without gradients. Returns None once `stopped` returns True.

        Raises ValueError if the model's output is not finite.
        """
        shape = self.sample_shape or model.sample_shape
        points = torch.empty(self.sample_count, *shape)
        for point, generator in zip(points, _generators(self.sample_count, seed, SAMPLING), strict=True):
            point.normal_(generator=generator)
        points = points.to(device)
        labels = None
        if self._takes_labels(model):
            labels = (torch.arange(self.sample_count) % self.null_class).to(device)
        for time, step in self.sampling(shape):
            if stopped():
                return None
            points = step(points, self._predicted(model, points, time, labels))
        if not points.isfinite().all():
            raise ValueError("the model's predictions are not finite")
        return to_uint8(points)

    def _predicted(self, model: nn.Module, points: Tensor, time: float, labels: Tensor | None) -> Tensor:
        count = len(points)
        timestep = torch.full((count,), time, dtype=self.time_dtype, device=points.device)
        if labels is None:
            return model(points, timestep).float()
        if self.guidance == 1 or not self.drop_condition:
            return model(points, timestep, labels=labels).float()
        both = torch.cat([torch.full_like(labels, self.null_class), labels])
        predicted = model(torch.cat([points, points]), torch.cat([timestep, timestep]), labels=both).float()
        free, guided = predicted[:count], predicted[count:]
        return free + self.guidance * (guided - free)

    def _takes_labels(self, model: nn.Module) -> bool:
        """Tells whether images are made with labels: a model that does not tell its conditions takes them."""
        return self.null_class is not None and LABELS in getattr(model, "condition_shapes", (LABELS,))

    def _without(self, condition: dict[str, Tensor], dropped: Tensor) -> dict[str, Tensor]:
        """Returns `condition` with the examples where `dropped` (bool [B]) is True emptied."""
        emptied = {}
        for name, tensor in condition.items():
            # A mask says which tokens are text. A dataset that asks a pipeline drops captions itself.
            kept = name in NEVER_DROPPED or "mask" in name or name.startswith(ASKED)
            if kept or not self.drop_condition:
                continue
            rows = dropped.view(-1, *[1] * (tensor.ndim - 1))
            emptied[name] = tensor.masked_fill(rows, self.null_class if name == LABELS else 0)
        return emptied

    def _check_labels(self, model: nn.Module, has_labels: bool) -> None:
        """Raises UserError if a label would be beyond the model's embeddings, which ends a GPU's process."""
        known = getattr(model, "num_labels", None)
        if has_labels and known is not None and self.null_class is not None and self.null_class >= known:
            raise UserError(
                f"task.null_class={self.null_class}: the model has embeddings for {known} labels: it needs"
                f" {self.null_class + 1}, one for each class and one for no label"
            )


@dataclass(frozen=True)
class ImageSampler(Sampler):
    """Makes the images of a task as one picture, a grid of them."""

    task: Diffusion
    seed: int

    def sample(self, model: nn.Module, device: torch.device, stopped: Callable[[], bool]) -> ImageSample | None:
        images = self.task.images(model, self.seed, device, stopped)
        if images is None:
            return None
        return ImageSample(
            grid_of(images), f"{len(images)} images, {self.task.sample_steps} steps of {self.task.sampled_by}"
        )


def _condition_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    others = (IMAGES, NOISY, TARGET, TIMESTEP, WEIGHT, LOSS_MASK)
    return {name: tensor for name, tensor in batch.items() if name not in others}


def _generators(count: int, *key: int) -> list[torch.Generator]:
    """Returns a CPU generator for each example; that of example k depends on `key` and k alone."""
    return [torch.Generator().manual_seed(int(word) & 0x7FFF_FFFF_FFFF_FFFF) for word in random_words(count, *key)]
