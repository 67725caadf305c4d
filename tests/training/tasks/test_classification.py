"""Classification: loss and accuracy against arithmetic by hand, and its refusals."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from offload import KnobError
from tests.training.helpers.in_process import composed
from training.errors import UserError
from training.tasks.classification import Classification

BATCH = {"images": torch.eye(3).view(3, 1, 1, 3), "labels": torch.tensor([0, 1, 0])}


class Weights(nn.Module):
    """Image k has the logits in row k."""

    def __init__(self, rows: list[list[float]], wrapped: bool = False):
        super().__init__()
        self.rows = nn.Parameter(torch.tensor(rows))
        self.wrapped = wrapped

    def forward(self, images: Tensor):
        logits = images.flatten(1) @ self.rows
        return SimpleNamespace(logits=logits) if self.wrapped else logits


ROWS = [[2.0, 0.0], [1.0, 0.0], [0.0, 0.0]]


def nats(right: float, wrong: float) -> float:
    return math.log(math.exp(right) + math.exp(wrong)) - right


@pytest.mark.parametrize("wrapped", [False, True])
def test_loss_and_scores(wrapped: bool) -> None:
    expected = (nats(2, 0) + nats(0, 1) + nats(0, 0)) / 3
    task, model = Classification(), Weights(ROWS, wrapped)
    assert task.loss(model, BATCH).item() == pytest.approx(expected)
    scores = task.scores(model, BATCH)
    assert scores["loss"].item() == pytest.approx(expected)
    # Right, wrong, and of equal logits the first.
    assert scores["accuracy"].item() == pytest.approx(2 / 3)


def test_smoothing_is_for_training_alone() -> None:
    task, model = Classification(label_smoothing=0.5), Weights(ROWS)
    assert task.scores(model, BATCH)["loss"].item() == pytest.approx((nats(2, 0) + nats(0, 1) + nats(0, 0)) / 3)
    wrong = (nats(0, 2) + nats(1, 0) + nats(0, 0)) / 3
    right = (nats(2, 0) + nats(0, 1) + nats(0, 0)) / 3
    assert task.loss(model, BATCH).item() == pytest.approx(0.75 * right + 0.25 * wrong)


def test_models_in_low_precision_get_images_of_their_dtype() -> None:
    loss = Classification().loss(Weights(ROWS).bfloat16(), BATCH)
    assert loss.dtype == torch.float32
    loss.backward()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(2, 3), "needs batches with images and labels"),
        ({"images": BATCH["images"]}, "needs batches with images and labels"),
        ({**BATCH, "labels": torch.tensor([0, 1, 2])}, "label 2, and the model has 2 classes"),
    ],
)
def test_batches_that_do_not_fit_are_refused(batch, message: str) -> None:
    with pytest.raises(UserError, match=f"^task=classification.*{message}"):
        Classification().loss(Weights(ROWS), batch)


def test_models_without_logits_are_refused() -> None:
    with pytest.raises(UserError, match=r"the model returns \[3, 1, 1, 3\], not a row of logits for each of 3 images"):
        Classification().loss(nn.Conv2d(1, 1, 1), BATCH)


def test_datasets_without_labels_are_refused() -> None:
    with pytest.raises(UserError, match=r"^task=classification: the dataset has no labels"):
        Classification().check(None, SimpleNamespace(num_classes=None), Weights(ROWS))
    Classification().check(None, SimpleNamespace(num_classes=2), Weights(ROWS))


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_smoothing_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(KnobError, match=r"^label_smoothing="):
        Classification(label_smoothing=value)


def test_more_classes_than_the_model_has_are_refused_before_a_step() -> None:
    """On a GPU such a label would end the process."""
    images = ("task=classification", "dataset=synthetic_images", "dataset.shape=[1,1,3]", "dataset.num_classes=2")
    config, _ = composed(*images)
    with torch.device("meta"):
        model = Weights(ROWS)
    for count, refused in ((2, nullcontext()), (3, pytest.raises(UserError, match="has 3 classes, and the model 2: "))):
        with refused:
            Classification().check(config, SimpleNamespace(num_classes=count), model)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("vocab_size", "a language model: take one of images"),
        ("condition_shapes", "a diffusion model: take task=flow_m"),
    ],
)
def test_models_of_other_tasks_are_refused(attribute: str, message: str) -> None:
    model = nn.Identity()
    setattr(model, attribute, {})
    with pytest.raises(UserError, match=f"^task=classification: Identity is {message}"):
        Classification().check_model(None, model)
