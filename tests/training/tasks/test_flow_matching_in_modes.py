"""Flow matching under offload modes: losses and images are those of the resident model, bit by bit."""

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
TASK = FlowMatching(null_class=len(CHARACTERS), sample_count=2, sample_steps=2)


def trained(name: str, mode: Mode, steps: int = 2, lr: float = 1e-3) -> tuple[list[float], Tensor]:
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
            parts = split_into(TASK.prepared(dataset.batch(step), step), 2)
            with attached.step():
                each = attached.accumulate([lambda part=part: TASK.loss(model, part) / 2 for part in parts])
            losses.append(sum(loss.item() for loss in each))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            return losses, TASK.images(model, 0, "cpu")
    finally:
        attached.detach()
        release(streams)


@pytest.fixture(scope="module")
def resident() -> dict[str, tuple[list[float], Tensor]]:
    return {name: trained(name, Resident()) for name in MODELS}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_losses_and_images_are_those_of_the_resident_model(name: str, mode: str, resident) -> None:
    losses, images = trained(name, MODES[mode]())
    assert losses == resident[name][0]
    assert torch.equal(images, resident[name][1])


def test_training_lowers_the_loss() -> None:
    losses, _ = trained("unet", Resident(), steps=40, lr=5e-3)
    assert sum(losses[-8:]) / 8 < 0.7 * sum(losses[:4]) / 4


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_needs_no_values(name: str) -> None:
    with torch.device("meta"):
        model = build_diffusion(*MODELS[name])
    assert model.condition_shapes == {"labels": ()}
    batch = TASK.prepared(SyntheticImages.meta_batch(2, shape=model.sample_shape, num_classes=2), 0)
    plan = dry_run(LayerStream(), model, [lambda: TASK.loss(model, batch)])
    assert sum(phase.flops for phase in plan.phases) > 0
    assert plan.peak_bytes > 0
