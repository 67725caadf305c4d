"""classification: predicts the class of an image."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from offload.knobs import in_range
from training.batches import Batch
from training.errors import UserError
from training.tasks.task import Task, refuse_language_model

logger = logging.getLogger(__name__)

# What else some models were trained on, by its keys there: with other values it is refused.
NOT_DONE = {"do_rescale": True, "do_flip_channel_order": False, "rescale_offset": False, "include_top": False}


class Classification(Task):
    """Trains `model(images) -> logits`, [B, classes] or an object with such `logits`, with cross-entropy.

    A batch has `images`, floating point [B, C, H, W], converted to the dtype of the model's parameters, and `labels`,
    int64 [B]. The loss is in nats an image, computed in float32. Images of datasets are from -1 to 1; pretrained
    weights get them with the mean and the deviation of the preprocessor_config.json that they came with.

    Args:
        label_smoothing: the share of the target that all classes share (Szegedy et al. 2016), in training alone.

    Raises KnobError if `label_smoothing` is out of range.
    """

    unit = "images"
    score_names = ("loss", "accuracy")

    def __init__(self, *, label_smoothing: float = 0.0):
        self.label_smoothing = in_range("label_smoothing", label_smoothing, at_least=0, at_most=1)
        self._mean = self._deviation = torch.tensor(0.5)

    def prepared(self, batch: Batch, seed: int) -> Batch:
        if (self._mean == 0.5).all() and (self._deviation == 0.5).all():
            return batch
        mean, deviation = (each.view(-1, 1, 1).to(batch["images"].device) for each in (self._mean, self._deviation))
        return batch | {"images": ((batch["images"] + 1) / 2 - mean) / deviation}

    def fit(self, config: DictConfig, model: nn.Module) -> dict[str, str]:
        # Not at the top: composing imports the tasks, and this imports safetensors.
        from training.weights.files import PICTURES_FILE
        from training.weights.model_tokenizer import WEIGHTS, folder_with, values_in

        folder = folder_with(PICTURES_FILE, config.model, (WEIGHTS,))
        values = values_in(folder, PICTURES_FILE)
        if not values:
            return {}
        mean, deviation = _normalisation(values, f"{folder / PICTURES_FILE}")
        self._mean, self._deviation = torch.tensor(mean), torch.tensor(deviation)
        self.files = (folder / PICTURES_FILE,)
        return {"images": f"mean {mean}, deviation {deviation}, those of {folder / PICTURES_FILE}"}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(_logits(model, batch), batch["labels"], label_smoothing=self.label_smoothing)

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Returns `loss`, without smoothing, and `accuracy`, the share of images whose class has the largest logit."""
        logits, labels = _logits(model, batch), batch["labels"]
        return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}

    def check_model(self, config: DictConfig, model: nn.Module) -> None:
        advice = "model=vit_l, or model=hf with model.task=classification"
        refuse_language_model(model, "classification", advice)
        # As a model of flow matching has them: it is called with a time, and returns no classes.
        if hasattr(model, "condition_shapes"):
            raise UserError(
                f"task=classification: {type(getattr(model, 'network', model)).__name__} is a diffusion model: take"
                f" task=flow_matching, or a classifier ({advice})"
            )

    def check(self, config: DictConfig, dataset: object, model: nn.Module) -> None:
        """Raises UserError if the dataset has no labelled images, or more classes than the model.

        Warns where loaded weights have other names for the classes than the dataset.
        """
        num_classes = getattr(dataset, "num_classes", None)
        if num_classes is None:
            raise UserError("task=classification: the dataset has no labels: take dataset=glyphs or images")
        known = self._classes_of(model, config)
        if known is not None and num_classes > known:
            raise UserError(
                f"task=classification: the dataset has {num_classes} classes, and the model {known}: set the model's"
                f" number of classes, in models of transformers 'model.overrides={{num_labels: {num_classes}}}'"
            )

        names = getattr(dataset, "class_names", ()) if hasattr(model, "hf") and config.model.weights is not None else ()
        for number, name in enumerate(names):
            if (came := model.hf.config.id2label.get(number)) not in (name, f"LABEL_{number}"):
                logger.warning(
                    "the model came with the class %d as %r, which is %r in the dataset, and is exported so: give the"
                    " dataset's in 'model.overrides={id2label: {%d: %s}}', all that differ",
                    *(number, came, name, number, name),
                )
                break

    def _classes_of(self, model: nn.Module, config: DictConfig) -> int | None:
        """Returns the model's number of classes, from a forward on the meta device; None if it cannot run there."""
        try:
            with torch.no_grad():
                return _logits(model, self.meta_batch(config, 1)).shape[1]
        except UserError:
            raise
        # On tensors without values a model may raise any error.
        except Exception:
            return None


def _normalisation(values: Mapping[str, Any], file: str) -> tuple[Any, Any]:
    """Returns the mean and the deviation by which a model has its images, from 0 to 1. Raises UserError for others."""
    for key, value in NOT_DONE.items():
        if values.get(key, value) not in (value, None):
            raise UserError(f"{file}: has {key}={values[key]}, which is not done to images here: take another model")
    if abs(255 * values.get("rescale_factor", 1 / 255) - 1) > 1e-4:
        raise UserError(f"{file}: rescale_factor={values['rescale_factor']} is not 1/255: take another model")
    if values.get("do_normalize") is False:
        return 0.0, 1.0
    if None in (found := (values.get("image_mean"), values.get("image_std"))):
        raise UserError(f"{file}: has no image_mean and image_std: write them into it, or do_normalize false")
    return found


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the model's logits in float32. Raises UserError if a label has none, which would end a GPU's process."""
    if not isinstance(batch, dict) or not {"images", "labels"} <= batch.keys():
        raise UserError("task=classification needs batches with images and labels: choose such a dataset")
    images = batch["images"].to(_dtype(model))
    output = model(images)
    logits = getattr(output, "logits", output)
    if logits.ndim != 2 or len(logits) != len(images):
        raise UserError(
            f"task=classification: the model returns {list(logits.shape)}, not a row of logits for each of"
            f" {len(images)} images: choose a classifier"
        )
    labels = batch["labels"]
    # On a device the host would wait for the answer; datasets make batches on the CPU, where it is checked.
    if labels.device.type == "cpu" and len(labels) and labels.max() >= logits.shape[1]:
        raise UserError(
            f"task=classification: label {int(labels.max())}, and the model has {logits.shape[1]} classes: set the"
            " model's number of classes to the dataset's"
        )
    return logits.float()


def _dtype(model: nn.Module) -> torch.dtype:
    return next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
