"""The tasks of diffusion models under offload modes: losses and images are those of the resident model, bit by bit."""

import pytest
import torch
from torch import Tensor

from models.diffusion import build_diffusion
from models.initialise import initialise
from offload import BounceLinear, LayerStream, Mode, Resident, ShardOffload, TensorSwap, acquire, release
from offload.planning import dry_run
from tests.models.helpers.unets import UNET
from training.batches import split_into
from training.data.glyphs import Glyphs
from training.data.synthetic_images import SyntheticImages
from training.optim import AdamW
from training.tasks.flow_matching import FlowMatching
from training.tasks.noise_prediction import NoisePrediction

MODES = {
    "bounce_linear": lambda: BounceLinear(outside="stream"),
    "layer_stream": LayerStream,
    "shard_offload": lambda: ShardOffload(shards=2),
    "layer_stream_swap": lambda: TensorSwap(LayerStream()),
}
CHARACTERS = "AB"
# It has a buffer that no state dict has, and draws random numbers of its own unless it is told not to.
DIT = {
    "sample_size": 8,
    "in_channels": 1,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_embeds_ada_norm": len(CHARACTERS),
}
MODELS = {
    "unet": ("UNet2DModel", {**UNET, "num_class_embeds": len(CHARACTERS) + 1}),
    "dit": ("DiTTransformer2DModel", DIT),
}
SAMPLES = {"null_class": len(CHARACTERS), "sample_count": 2, "sample_steps": 2}
TASKS = {"flow": FlowMatching(**SAMPLES), "noise": NoisePrediction(**SAMPLES, snr_gamma=5.0)}


def trained(task: str, name: str, mode: Mode, steps: int = 2, lr: float = 1e-3) -> tuple[list[float], Tensor]:
    """Builds on meta, fills and trains in two microbatches. Returns losses, and images at the end."""
    dataset = Glyphs(CHARACTERS, size=8, seed=0, batch_size=4, count=40)
    with torch.device("meta"):
        model = build_diffusion(*MODELS[name])
    streams = acquire("cpu")
    attached = mode.attach(model, streams)
    try:
        initialise(model, 0)
        model.fill_buffers()
        optimizer = AdamW(model.parameters(), lr=lr)
        losses = []
        for step in range(steps):
            parts = split_into(TASKS[task].prepared(dataset.batch(step), step), 2)
            with attached.step():
                each = attached.accumulate([lambda part=part: TASKS[task].loss(model, part) / 2 for part in parts])
            losses.append(sum(loss.item() for loss in each))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            return losses, TASKS[task].images(model, 0, "cpu")
    finally:
        attached.detach()
        release(streams)


@pytest.fixture(scope="module")
def resident() -> dict[tuple[str, str], tuple[list[float], Tensor]]:
    return {(task, name): trained(task, name, Resident()) for task in TASKS for name in MODELS}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.slow
def test_losses_and_images_are_those_of_the_resident_model(task: str, name: str, mode: str, resident) -> None:
    losses, images = trained(task, name, MODES[mode]())
    assert losses == resident[task, name][0]
    assert torch.equal(images, resident[task, name][1])


@pytest.mark.parametrize(
    "task", [each if each == "flow" else pytest.param(each, marks=pytest.mark.slow) for each in TASKS]
)
def test_training_lowers_the_loss(task: str) -> None:
    losses, _ = trained(task, "unet", Resident(), steps=40, lr=5e-3)
    assert sum(losses[-8:]) / 8 < 0.7 * sum(losses[:4]) / 4


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", TASKS)
def test_a_plan_needs_no_values(task: str, name: str) -> None:
    with torch.device("meta"):
        model = build_diffusion(*MODELS[name])
    assert model.condition_shapes == {"labels": ()}
    batch = TASKS[task].prepared(SyntheticImages.meta_batch(2, shape=model.sample_shape, num_classes=2), 0)
    plan = dry_run(LayerStream(), model, [lambda: TASKS[task].loss(model, batch)])
    assert sum(phase.flops for phase in plan.phases) > 0
    assert plan.peak_bytes > 0
