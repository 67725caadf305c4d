"""What the tasks of diffusion models share: their conditions, and the scheduler that decides between them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from offload import KnobError
from tests.models.helpers.saving import save_diffusion
from tests.models.helpers.small_diffusion import SMALL, inputs_of, small
from tests.models.test_diffusion_scheduler import SCALED, pipeline, saved
from tests.test_any_diffusion import job
from tests.test_any_model import curve
from tests.training.helpers.in_process import run_here
from tests.training.tasks.test_flow_matching import CLASSES, CONFIG, Linear, labelled
from tests.training.tasks.test_noise_prediction import drawn
from training.data.glyphs import Glyphs
from training.data.synthetic_images import SyntheticImages
from training.errors import UserError
from training.tasks.diffusion import Diffusion
from training.tasks.flow_matching import FlowMatching
from training.tasks.noise_prediction import NoisePrediction

TASKS = {"flow_matching": FlowMatching, "noise_prediction": NoisePrediction}
FLOW, EULER = "FlowMatchEulerDiscreteScheduler", "EulerDiscreteScheduler"


@pytest.fixture(params=TASKS)
def kind(request: pytest.FixtureRequest) -> type[Diffusion]:
    return TASKS[request.param]


def test_dropped_examples_lose_their_whole_condition(kind: type[Diffusion]) -> None:
    count = 2000
    others = {
        "labels": torch.zeros(count, dtype=torch.int64),
        "encoder_hidden_states": torch.ones(count, 2, 3),
    }
    masks = ("encoder_attention_mask", "encoder_hidden_states_mask")
    facts = ("time_ids", *masks, "other_latents", "asked.text")
    others |= {name: torch.ones(count, 6) for name in facts}
    batch = {"images": torch.zeros(count, 1, 1, 1), **others}
    prepared = kind(null_class=CLASSES, drop_condition=0.25).prepared(batch, 0)
    dropped = prepared["labels"] == CLASSES
    assert dropped.float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert (prepared["labels"][~dropped] == 0).all()
    assert torch.equal(prepared["encoder_hidden_states"], (~dropped).float().view(-1, 1, 1).expand(-1, 2, 3))
    for name in facts:
        assert torch.equal(prepared[name], others[name]), name
    assert torch.equal(batch["labels"], torch.zeros(count, dtype=torch.int64))


def test_labels_without_a_class_for_none_are_refused(kind: type[Diffusion]) -> None:
    with pytest.raises(KnobError, match=r"^null_class=None: the dataset has labels: give the number of classes, "):
        kind().prepared(labelled(2), 0)


@pytest.mark.parametrize("batch", [torch.zeros(2, 3), {"labels": torch.zeros(2)}])
def test_batches_without_images_are_refused(kind: type[Diffusion], batch: object) -> None:
    with pytest.raises(ValueError, match="needs a batch with `images`"):
        kind().prepared(batch, 0)


def test_velocities_of_another_shape_are_refused(kind: type[Diffusion]) -> None:
    task = kind()
    batch = task.prepared({"images": torch.zeros(2, 3, 4, 4)}, 0)
    with pytest.raises(UserError, match=r"the model returns \[2, 1, 4, 4\] for images \[2, 3, 4, 4\]"):
        task.loss(OneChannel(), batch)


def test_a_model_without_room_for_no_label_is_refused(kind: type[Diffusion]) -> None:
    task, model = kind(null_class=CLASSES), Linear()
    model.num_labels = CLASSES
    message = r"^task.null_class=3: the model has embeddings for 3 labels: it needs 4"
    with pytest.raises(UserError, match=message):
        task.loss(model, task.prepared(labelled(2), 0))
    with pytest.raises(UserError, match=message):
        task.check(None, WithClasses(CLASSES), model)


@pytest.mark.parametrize(
    ("keys", "num_classes", "num_labels", "message"),
    [
        ({"null_class": CLASSES}, 5, None, r"task\.null_class=3: a class of the dataset, which has 5"),
        ({"drop_condition": 0}, 4, 3, "the dataset has 4 classes, and the model has embeddings for 3 labels"),
        ({"drop_condition": 0}, 3, 3, None),
        ({}, CLASSES, None, r"^task\.null_class=null: .* take task\.null_class=3, the number"),
    ],
)
def test_classes_and_embeddings_must_fit(
    kind: type[Diffusion], keys: dict, num_classes: int, num_labels: int | None, message: str | None
) -> None:
    model = Linear()
    model.num_labels = num_labels
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        kind(**keys).check(None, WithClasses(num_classes), model)


def test_a_language_model_is_refused(kind: type[Diffusion]) -> None:
    model = Linear()
    model.vocab_size = 3
    with pytest.raises(UserError, match=rf"^task={kind.name}: Linear is a language model: take one"):
        kind(null_class=CLASSES).check_model(None, model)


def test_a_dataset_without_images_is_refused(kind: type[Diffusion]) -> None:
    with pytest.raises(UserError, match="dataset has no images: take dataset=glyphs"):
        kind().check(None, object(), Linear())


@pytest.mark.parametrize(
    ("takes", "labels", "message"),
    [
        ((), False, None),
        (("labels",), True, None),
        (("labels",), False, "the model needs labels, which the dataset has not"),
        (("labels", "text_embeds"), True, "the model needs text_embeds, which the dataset has not"),
        ((), True, "the dataset has labels, and the model takes none: take a dataset without"),
    ],
)
def test_conditions_of_dataset_and_model_must_fit(
    kind: type[Diffusion], takes: tuple, labels: bool, message: str | None
) -> None:
    task, model = kind(null_class=CLASSES), Linear()
    model.condition_shapes = dict.fromkeys(takes, ())
    options = {"characters": "abc", "labels": labels}
    config = OmegaConf.create({"dataset": {"_target_": "training.data.glyphs.Glyphs", **options}})
    dataset = Glyphs(**options, seed=0, batch_size=2)
    with nullcontext() if message is None else pytest.raises(UserError, match=f"^task={kind.name}: {message}"):
        task.check(config, dataset, model)


def test_a_condition_that_the_model_cannot_use_is_refused(kind: type[Diffusion]) -> None:
    task, model = kind(), Linear()
    model.condition_shapes, model.optional_conditions = {"text": (2, 3)}, ("mask",)
    dataset = {"_target_": "training.data.synthetic_images.SyntheticImages", "shape": [1, 2, 2]}
    condition = {"text": [2, 3], "mask": [2]}
    config = OmegaConf.create({"dataset": dataset | {"condition": condition}})
    task.check(config, SyntheticImages(seed=0, batch_size=1), model)
    config = OmegaConf.create({"dataset": dataset | {"condition": condition | {"pooled": [4]}}})
    with pytest.raises(UserError, match=rf"^task={kind.name}: the dataset has pooled, .*; it takes text, mask"):
        task.check(config, SyntheticImages(seed=0, batch_size=1), model)


class OneChannel(nn.Module):
    def forward(self, noisy: Tensor, timestep: Tensor) -> Tensor:
        return noisy[:, :1]


class WithClasses:
    def __init__(self, num_classes: int):
        self.num_classes = num_classes

    @staticmethod
    def meta_batch(rows: int) -> dict[str, Tensor]:
        return {}


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({}, "the size of images is unknown: give task.sample_shape="),
        ({"sample_shape": (4, 32, 32)}, r"tensors of shape \[4, 32, 32\], which are no pictures"),
        (
            {"sample_shape": (3, 8, 8), "condition_shapes": {"labels": ()}},
            "the model takes labels: give their number, as task.null_class",
        ),
        (
            {"sample_shape": (3, 8, 8), "condition_shapes": {"encoder_hidden_states": (1, 2)}},
            "conditioned on encoder_hidden_states, and samples are made from labels alone",
        ),
    ],
)
def test_models_without_pictures_are_refused(kind: type[Diffusion], attributes: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"^sample.every=5: .*{message}"):
        kind().sampler(CONFIG, SimpleNamespace(**attributes))


def config_of(source: object, weights: object = None) -> DictConfig:
    return OmegaConf.create({"model": {"source": str(source), "weights": None if weights is None else str(weights)}})


@pytest.mark.parametrize(
    ("task", "name", "config", "message"),
    [
        ("flow_matching", EULER, SCALED, "a model that predicts epsilon: take task=noise_prediction"),
        ("flow_matching", "DDIMScheduler", {"prediction_type": "v_prediction"}, "predicts v_prediction: take task=noi"),
        ("noise_prediction", FLOW, {}, "a model that predicts velocities: take task=flow_matching"),
    ],
)
def test_a_scheduler_of_another_task_is_refused(
    tmp_path: Path, task: str, name: str, config: dict, message: str
) -> None:
    file, model = saved(tmp_path / "scheduler", name, **config), small("dit")
    save_diffusion(model, tmp_path / "transformer")
    for source in (tmp_path, tmp_path / "transformer", tmp_path / "transformer/diffusion_pytorch_model.safetensors"):
        with pytest.raises(UserError, match=rf"^task={task}: {file} belongs to .*{message}\w*$"):
            TASKS[task]().fit(config_of("x", source), model)
    with pytest.raises(UserError, match=r"or task.scheduler=null for weights from the seed$"):
        TASKS[task]().fit(config_of(tmp_path), model)
    TASKS[task](scheduler=None).fit(config_of(tmp_path), model)
    (other,) = TASKS.keys() - {task}
    TASKS[other]().fit(config_of(tmp_path, tmp_path), model)


@pytest.mark.parametrize("task", TASKS)
def test_weights_without_a_scheduler_are_refused(tmp_path: Path, task: str) -> None:
    weights = tmp_path / "model.safetensors"
    weights.touch()
    message = rf"^task.scheduler=auto: there is no scheduler_config.json beside model.weights={weights}, .* or null if"
    with pytest.raises(UserError, match=message):
        TASKS[task]().fit(config_of("UNet2DModel", weights), small("unet"))
    TASKS[task](scheduler=None).fit(config_of("UNet2DModel", weights), small("unet"))
    TASKS[task]().fit(config_of("UNet2DModel"), small("unet"))


def test_a_scheduler_may_be_given(tmp_path: Path) -> None:
    file = saved(tmp_path / "mine", EULER, **SCALED, prediction_type="v_prediction")
    task = NoisePrediction(scheduler=str(file.parent))
    reasons = task.fit(config_of("UNet2DModel", tmp_path), small("unet"))
    assert reasons == {"task.scheduler": f"v_prediction, 1000 steps, scaled_linear betas: that of {file}"}
    with pytest.raises(UserError, match=r"^task.scheduler=nowhere: no scheduler_config.json there: give that file"):
        NoisePrediction(scheduler="nowhere").fit(config_of("UNet2DModel"), small("unet"))
    file.write_text("{}")
    with pytest.raises(UserError, match=rf"^task.scheduler={file}: {file}: _class_name=None .*; or take .*=null$"):
        NoisePrediction(scheduler=str(file)).fit(config_of("UNet2DModel"), small("unet"))


def test_a_unet_of_latents_is_refused(tmp_path: Path) -> None:
    """CompVis/ldm-celebahq-256 has latents of three channels, for which pictures would pass."""
    saved(tmp_path / "scheduler", "DDIMScheduler")
    index, task = tmp_path / "model_index.json", NoisePrediction()
    for parts in ({"unet": []}, {"unet": [], "vqvae": ["diffusers", "VQModel"]}):
        index.write_text(json.dumps(parts))
        refused = pytest.raises(UserError, match=rf"^task=noise_prediction: .* latents of the vqvae in {index}: take a")
        with refused if "vqvae" in parts else nullcontext():
            task.fit(config_of(tmp_path), small("unet"))


def loss_of_script(folder: Path, name: str, seed: int, mu: float | None) -> tuple[Tensor, Tensor]:
    """The times of a seed, moved by the scheduler of diffusers itself, and the loss at them."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler")
    images, condition = inputs_of(name)
    noise, normal = drawn(images, seed, lambda generator: torch.randn((), generator=generator))
    scheduler.set_timesteps(sigmas=normal.sigmoid().tolist(), mu=mu)
    times = scheduler.sigmas[:-1]
    if mu is not None:
        # As numpy rounds it, and as torch does.
        assert torch.allclose(times, scheduler.time_shift(mu, 1.0, normal.sigmoid()), rtol=1e-6)
        times = scheduler.time_shift(mu, 1.0, normal.sigmoid())
    t = times.view(-1, 1, 1, 1)
    velocity = small(name)((1.0 - t) * images + t * noise, times, **condition)
    return times, torch.nn.functional.mse_loss(velocity.float(), noise - images)


@pytest.mark.parametrize(
    ("name", "numbers", "tokens"),
    [
        ("sdxl", {"shift": 3.0}, None),
        ("flux", {"use_dynamic_shifting": True, "base_shift": 0.9, "max_shift": 2.0}, 6),
        ("dit", {"use_dynamic_shifting": True, "time_shift_type": "linear"}, 16),
        ("unet", {}, None),
    ],
)
def test_times_of_flow_matching_are_moved_by_the_shift_of_the_scheduler(
    tmp_path: Path, name: str, numbers: dict, tokens: int | None
) -> None:
    file = saved(tmp_path / "scheduler", FLOW, **numbers)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    model, task = small(name), FlowMatching(drop_condition=0)
    reasons = task.fit(config_of(tmp_path, tmp_path), model)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path, subfolder="scheduler").config
    bounds = scheduler.base_image_seq_len, scheduler.max_image_seq_len, scheduler.base_shift, scheduler.max_shift
    mu = None if tokens is None else calculate_shift(tokens, *bounds)
    assert list(reasons) == ["task.shift"]
    assert str(file) in reasons["task.shift"]
    images, condition = inputs_of(name)
    for seed in range(3):
        times, expected = loss_of_script(tmp_path, name, seed, mu)
        prepared = task.prepared({"images": images, **condition}, seed)
        assert torch.equal(prepared["timestep"], times)
        assert torch.equal(task.loss(model, prepared), expected)


def test_a_shift_that_is_given_counts(tmp_path: Path) -> None:
    pipeline(tmp_path, "DDPMPipeline")
    task = FlowMatching(shift=2.0)
    assert task.fit(config_of(tmp_path, tmp_path), small("unet")) == {}
    images = torch.zeros(2, 1, 8, 8)
    times = FlowMatching().prepared({"images": images}, 0)["timestep"]
    assert torch.equal(task.prepared({"images": images}, 0)["timestep"], 2 * times / (1 + times))
    with pytest.raises(UserError, match=r"^task.shift=null: .* does not tell how .*: give task.shift=NUMBER$"):
        FlowMatching().fit(config_of(tmp_path, tmp_path), small("unet"))
    pipeline(tmp_path, "FluxPipeline")
    task = FlowMatching()
    task.fit(config_of(tmp_path, tmp_path), small("unet"))
    refused = r"^task.shift=null: .*tokens, which are not known of this model: give task.shift=NUMBER; .* take 1"
    with pytest.raises(UserError, match=refused):
        task.prepared({"images": images}, 0)


@pytest.mark.parametrize(
    ("task", "scheduler", "name"),
    [
        ("noise_prediction", (EULER, {**SCALED, "prediction_type": "v_prediction"}), "sdxl"),
        pytest.param("flow_matching", (FLOW, {"shift": 3.0}), "flux", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("small_activations")
def test_a_pipeline_trains_to_the_same_losses_in_a_mode(
    tmp_path: Path, task: str, scheduler: tuple[str, dict], name: str
) -> None:
    folder = tmp_path / "pipeline"
    saved(folder / "scheduler", scheduler[0], **scheduler[1])
    save_diffusion(small(name), folder / ("unet" if "UNet" in SMALL[name][0] else "transformer"))
    left = ("model.source", "model.overrides", "task=")
    given = [each for each in job(name) if not each.startswith(left)]
    given += [f"model.source={folder}", "model.overrides=null", f"task={task}"]
    if task == "noise_prediction":
        given.append("task.snr_gamma=5")
    run_here(tmp_path / "none", *given, "offload=none")
    assert run_here(tmp_path / "streamed", *given, "offload=layer_stream")["transfer/h2d_gib"] > 0
    assert curve(tmp_path / "streamed") == curve(tmp_path / "none")
    assert len(curve(tmp_path / "none")) == 2
    assert f"{folder}/scheduler" in (tmp_path / "none" / "plan.json").read_text()
    (other,) = TASKS.keys() - {task}
    refused = [each for each in given if not each.startswith("task")]
    with pytest.raises(UserError, match=rf"take task={task}$"):
        run_here(tmp_path / "other", *refused, f"task={other}")
    assert not (tmp_path / "other" / "metrics.jsonl").exists()
