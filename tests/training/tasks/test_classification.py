"""Classification: loss and accuracy against arithmetic by hand, and its refusals."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers.image_transforms import normalize

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


def test_other_names_of_classes_than_the_weights_came_with_are_told(caplog: pytest.LogCaptureFixture) -> None:
    config, _ = composed(
        "task=classification", "dataset=synthetic_images", "dataset.shape=[1,1,3]", "dataset.num_classes=2"
    )
    with torch.device("meta"):
        model = Weights(ROWS)
    model.hf = SimpleNamespace(config=SimpleNamespace(id2label={0: "ant", 1: "LABEL_1"}))
    for weights, names in ((None, ["bee", "cow"]), ("DIR", ["ant", "cow"]), ("DIR", ["bee", "cow"])):
        config.model.weights = weights
        assert not caplog.messages
        Classification().check(config, SimpleNamespace(num_classes=2, class_names=names), model)
    assert "the class 0 as 'ant', which is 'bee'" in caplog.text
    assert "model.overrides={id2label: {0: bee}}" in caplog.text


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


def fitted(folder: Path, values: dict) -> Classification:
    """A task that has seen the files of pretrained weights."""
    (folder / "config.json").write_text("{}")
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    task = Classification()
    task.fit(OmegaConf.create({"model": {"weights": str(folder)}}), None)
    return task


MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@pytest.mark.parametrize(
    ("values", "mean", "deviation"),
    [
        ({"image_mean": MEAN, "image_std": DEVIATION, "rescale_factor": 0.00392156862745098}, MEAN, DEVIATION),
        ({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_normalize": True}, [0.5] * 3, [0.5] * 3),
        ({"image_mean": MEAN, "image_std": DEVIATION, "do_normalize": False}, [0.0] * 3, [1.0] * 3),
    ],
)
def test_pretrained_weights_get_images_as_they_had_them(values: dict, mean: list, deviation: list, tmp_path: Path):
    pixels = torch.arange(48).view(3, 4, 4) * 5
    batch = {"images": pixels[None] / 127.5 - 1, "labels": torch.tensor([0])}
    expected = normalize(pixels.numpy() / 255, mean, deviation, input_data_format="channels_first")
    task = fitted(tmp_path, values)
    made = task.prepared(batch, 0)["images"]
    assert task.files == (tmp_path / "preprocessor_config.json",)
    torch.testing.assert_close(made[0].double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", [None, "folder"])
def test_the_checkpoint_of_a_run_has_the_images_of_that_run(weights: str | None, tmp_path: Path):
    folder, checkpoint = tmp_path / "folder", tmp_path / "checkpoint"
    folder.mkdir()
    checkpoint.mkdir()
    expected = fitted(folder, {"image_mean": MEAN, "image_std": DEVIATION}) if weights else Classification()
    run = {"source": str(folder), "weights": str(folder) if weights else None}
    (checkpoint / "config.yaml").write_text(json.dumps({"model": run}))
    task, batch = Classification(), {"images": torch.ones(1, 3, 1, 1)}
    task.fit(OmegaConf.create({"model": {"weights": str(checkpoint)}}), None)
    assert torch.equal(task.prepared(batch, 0)["images"], expected.prepared(batch, 0)["images"])


@pytest.mark.parametrize(
    "values", [{}, {"do_flip_channel_order": True}, {"include_top": True}, {"rescale_factor": 1 / 127.5}]
)
def test_images_that_the_weights_had_in_another_form_are_refused(values: dict, tmp_path: Path):
    with pytest.raises(UserError, match=f"preprocessor_config.json: .*{next(iter(values), 'image_mean')}"):
        fitted(tmp_path, {"do_resize": True} | values)
