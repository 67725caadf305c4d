"""flow_matching: learns the velocity that turns noise into images, and makes images with it.

Rectified flow (Liu, Gong, Liu 2022, "Flow Straight and Fast"): a point on the straight line between an image x and
noise n is (1 - t) x + t n, and the model predicts its velocity n - x. Times t are logit-normal, which trains most where
the prediction is hardest (Esser et al. 2024, "Scaling Rectified Flow Transformers"). The condition is dropped for some
examples, so that the same model also predicts without it, as classifier-free guidance needs (Ho and Salimans 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from offload import KnobError
from offload.knobs import in_range
from training.batches import Batch
from training.data.packing import random_words
from training.errors import UserError
from training.tasks.sample import ImageSample, grid_of, to_uint8
from training.tasks.task import Sampler, Task, refuse_language_model

IMAGES, LABELS, NOISE, TIMESTEP = "images", "labels", "noise", "timestep"
# Facts about sizes and places, and latents that the model continues or fills, which it is always told.
NEVER_DROPPED = (
    "time_ids",
    "added_time_ids",
    "encoder_attention_mask",
    "other_latents",
    "image_latents",
    "control_hidden_states",
    "context_latents",
)
# In the key of random numbers: those of the samples.
SAMPLING = 1


class FlowMatching(Task):
    """Trains `model(noisy, timestep, **condition) -> velocity`, and samples with Euler's method.

    A batch has `images`, floating point [B, C, H, W] (or a video's or latents' [B, C, ...]). Its other tensors are the
    condition: `labels`, int64 [B], or embeddings of any names. `noisy` and `velocity` have the shape of the images,
    `noisy` is float32, and so is `timestep` [B], from 0 (image) to 1 (noise).

    A dropped label becomes `null_class`; every other dropped tensor becomes zeros.

    Args:
        timestep_mean: times are the sigmoid of normal numbers of this mean: above 0 more noise, below 0 less.
        timestep_std: their standard deviation.
        null_class: the label that stands for no label, the number of classes; null for images without labels.
        drop_condition: the probability that an example is trained without its condition.
        sample_steps: steps of Euler's method from noise to image.
        guidance: how far to go from the prediction without label to that with the label; 1 takes that with the label
            as it is, and so does drop_condition=0, with which no model learns to predict without.
        sample_count: images in a sample. Image k has label k modulo the number of classes.
        sample_shape: [channels, height, width] of a sampled image; null asks the model.

    Raises KnobError if a value is out of range.
    """

    unit = "images"

    def __init__(
        self,
        *,
        timestep_mean: float = 0.0,
        timestep_std: float = 1.0,
        null_class: int | None = None,
        drop_condition: float = 0.1,
        sample_steps: int = 25,
        guidance: float = 2.0,
        sample_count: int = 16,
        sample_shape: tuple[int, int, int] | None = None,
    ):
        # At 10 nearly every time is within 1e-4 of 0 or 1.
        self.timestep_mean = in_range("timestep_mean", timestep_mean, at_least=-10, at_most=10)
        self.timestep_std = in_range("timestep_std", timestep_std, at_least=0, at_most=10)
        self.null_class = None if null_class is None else in_range("null_class", null_class, at_least=1)
        self.drop_condition = in_range("drop_condition", drop_condition, at_least=0, at_most=1)
        self.sample_steps = in_range("sample_steps", sample_steps, at_least=1)
        self.guidance = in_range("guidance", guidance, at_least=0)
        self.sample_count = in_range("sample_count", sample_count, at_least=1)
        if sample_shape is not None and (len(sample_shape) != 3 or not all(size >= 1 for size in sample_shape)):
            raise KnobError("sample_shape", list(sample_shape), "must be [channels, height, width]")
        self.sample_shape = None if sample_shape is None else tuple(sample_shape)

    def prepared(self, batch: Batch, seed: int) -> Batch:
        """Adds `noise` (float32, as `images`) and `timestep` (float32 [B]), and drops conditions.

        The numbers of example k depend on `seed` and k alone. A batch on the meta device gets meta tensors.

        Raises KnobError if labels are to be dropped, and there is no `null_class`.
        """
        images = _images_of(batch)
        condition = _condition_of(batch)
        if LABELS in condition and self.drop_condition and self.null_class is None:
            advice = "the dataset has labels: give the number of classes, take drop_condition=0, or a dataset without"
            raise KnobError("null_class", None, f"{advice} (dataset.labels=false, dataset.label_column=null)")
        if images.is_meta:
            return {
                **batch,
                NOISE: torch.empty_like(images, dtype=torch.float32),
                TIMESTEP: images.new_empty(len(images), dtype=torch.float32),
            }
        # `empty_like` would take over the layout of the images in memory, which may be any.
        noise = torch.empty(images.shape)
        normal, uniform = torch.empty(2, len(images))
        for example, generator in enumerate(_generators(len(images), seed)):
            normal[example] = torch.randn((), generator=generator)
            uniform[example] = torch.rand((), generator=generator)
            noise[example].normal_(generator=generator)
        timestep = torch.sigmoid(normal * self.timestep_std + self.timestep_mean)
        return {
            **batch,
            **self._without(condition, uniform < self.drop_condition),
            NOISE: noise,
            TIMESTEP: timestep,
        }

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean squared error of the velocity of a prepared batch: float32, a scalar.

        Raises UserError if the model has no embedding for the label that stands for none, or its output another shape.
        """
        self._check_labels(model, LABELS in batch)
        images, noise = _images_of(batch).float(), batch[NOISE]
        t = batch[TIMESTEP].view(-1, *[1] * (images.ndim - 1))
        velocity = model((1 - t) * images + t * noise, batch[TIMESTEP], **_condition_of(batch))
        if velocity.shape != images.shape:
            # Torch would repeat the smaller one, and the loss would mean nothing.
            raise UserError(
                f"task=flow_matching: the model returns {list(velocity.shape)} for images {list(images.shape)}: choose"
                " a model with as many channels out as in"
            )
        return F.mse_loss(velocity.float(), noise - images)

    def check_model(self, config: DictConfig, model: nn.Module) -> None:
        refuse_language_model(model, "flow_matching", "model=unet_small, or model=diffusers")

    def check(self, config: DictConfig, dataset: object, model: nn.Module) -> None:
        """Raises UserError if the dataset has no images, or not the conditions that the model takes."""
        if not hasattr(type(dataset), "meta_batch"):
            raise UserError("task=flow_matching: the dataset has no images: take dataset=glyphs, images or hub_images")
        shapes = getattr(model, "condition_shapes", None)
        if (num_classes := getattr(dataset, "num_classes", None)) is not None:
            self._check_classes(num_classes, model, shapes)
        if shapes is None:
            return
        given = _condition_of(self.meta_batch(config, 1))
        if missing := [name for name in shapes if name not in given]:
            raise UserError(
                f"task=flow_matching: the model needs {', '.join(missing)}, which the dataset has not: choose another"
                " dataset; random numbers are in dataset=synthetic_images, for its key condition or num_classes"
            )
        optional = getattr(model, "optional_conditions", None)
        if optional is not None and (unknown := [name for name in given if name not in (*shapes, *optional)]):
            raise UserError(
                f"task=flow_matching: the dataset has {', '.join(unknown)}, which the model cannot use; it takes"
                f" {', '.join([*shapes, *optional]) or 'no condition'}: take a dataset without, or another model"
            )

    def _check_classes(self, num_classes: int, model: nn.Module, shapes: Mapping[str, object] | None) -> None:
        if shapes is not None and LABELS not in shapes:
            raise UserError(
                "task=flow_matching: the dataset has labels, and the model takes none: take a dataset without"
                " (dataset.labels=false, dataset.label_column=null), or a model with embeddings of classes"
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
                f"task=flow_matching: the dataset has {num_classes} classes, and the model has embeddings for {known}"
                " labels: give it more, or take another dataset"
            )

    def sample_forwards(self, config: DictConfig, model: nn.Module) -> Sequence[Callable[[], object]]:
        shape = self.sample_shape or getattr(model, "sample_shape", None)
        if shape is None:
            return ()
        points, labels = torch.empty(self.sample_count, *shape, device="meta"), None
        if self._takes_labels(model):
            labels = torch.empty(self.sample_count, dtype=torch.int64, device="meta")
        return (lambda: self._velocity(model, points, 1.0, labels),)

    def sampler(self, config: DictConfig, model: nn.Module) -> ImageSampler:
        """Makes the sampler of a run. Raises UserError for a model that makes no images, or not from labels alone."""
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
        """Makes `sample_count` images with Euler's method: uint8 [count, height, width, channels] on the CPU.

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
        # Computed on the CPU, so that every device takes the same steps.
        times = torch.linspace(1, 0, self.sample_steps + 1).tolist()
        for time, following in pairwise(times):
            if stopped():
                return None
            points = points + (following - time) * self._velocity(model, points, time, labels)
        if not points.isfinite().all():
            raise ValueError("the model's velocities are not finite")
        return to_uint8(points)

    def _velocity(self, model: nn.Module, points: Tensor, time: float, labels: Tensor | None) -> Tensor:
        count = len(points)
        timestep = torch.full((count,), time, dtype=torch.float32, device=points.device)
        if labels is None:
            return model(points, timestep).float()
        if self.guidance == 1 or not self.drop_condition:
            return model(points, timestep, labels=labels).float()
        both = torch.cat([torch.full_like(labels, self.null_class), labels])
        velocities = model(torch.cat([points, points]), torch.cat([timestep, timestep]), labels=both).float()
        free, guided = velocities[:count], velocities[count:]
        return free + self.guidance * (guided - free)

    def _takes_labels(self, model: nn.Module) -> bool:
        """Tells whether images are made with labels: a model that does not tell its conditions takes them."""
        return self.null_class is not None and LABELS in getattr(model, "condition_shapes", (LABELS,))

    def _without(self, condition: dict[str, Tensor], dropped: Tensor) -> dict[str, Tensor]:
        """Returns `condition` with the examples where `dropped` (bool [B]) is True emptied."""
        emptied = {}
        for name, tensor in condition.items():
            if name in NEVER_DROPPED or not self.drop_condition:
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

    task: FlowMatching
    seed: int

    def sample(self, model: nn.Module, device: torch.device, stopped: Callable[[], bool]) -> ImageSample | None:
        images = self.task.images(model, self.seed, device, stopped)
        if images is None:
            return None
        return ImageSample(grid_of(images), f"{len(images)} images, {self.task.sample_steps} steps of Euler's method")


def _images_of(batch: Batch) -> Tensor:
    if not isinstance(batch, dict) or IMAGES not in batch or not batch[IMAGES].is_floating_point():
        raise ValueError("task=flow_matching needs a batch with `images` in floating point: choose a dataset of images")
    return batch[IMAGES]


def _condition_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name not in (IMAGES, NOISE, TIMESTEP)}


def _generators(count: int, *key: int) -> list[torch.Generator]:
    """Returns a CPU generator for each example; that of example k depends on `key` and k alone."""
    return [torch.Generator().manual_seed(int(word) & 0x7FFF_FFFF_FFFF_FFFF) for word in random_words(count, *key)]
