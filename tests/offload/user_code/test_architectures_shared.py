"""Architectures that people train, tiny, on two processes that share their homes: gradients are those of one process.

Each process has its own microbatch, of one sample with the models of diffusers. Most are slow tests.
"""

from functools import partial

import pytest
from torch import Tensor, nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.shard_offload import ShardOffload
from offload.sharing import slices
from tests.models.helpers.small_diffusion import SMALL, TIMES, inputs_of, small
from tests.offload.helpers.architecture_cases import ARCHITECTURES, MODES, built
from tests.offload.helpers.foreign import fresh, loss_of
from tests.offload.helpers.shared_training import same_as_one_process
from tests.offload.helpers.sharers import use_collectives

# The first step shows which gradients land once; from the second on those of what stays are summed inside backward.
STEPS = 3
SHARED = [mode for mode in MODES if mode not in ("tensor_swap", "shard_offload_2", "shard_offload_all")]
# In every run of the tests: experts, a scale by itself, and weights that stay, each in one mode.
FAST = {("hidream", "layer_stream"), ("clip", "bounce_linear_all"), ("gpt2", "shard_offload")}
CASES = [
    pytest.param(name, mode, (row + column) % 2, marks=() if (name, mode) in FAST else pytest.mark.slow)
    # The autoencoder draws noise in its forward, and threads draw from one generator.
    for row, name in enumerate(name for name in ARCHITECTURES if name != "autoencoder")
    for column, mode in enumerate(SHARED)
]
OF_DIFFUSERS = {
    "bounce_linear": lambda: BounceLinear(slots=8),
    "layer_stream": lambda: LayerStream(slots=2),
    "layer_stream resident": lambda: LayerStream(slots=2, resident=1),
    "shard_offload": lambda: ShardOffload(shard_bytes="16KiB"),
}
# Parameters of the shape of an activation, whose gradient has the memory of that activation's (`DeviceSums`).
SHIFTED = {("pixart", "bounce_linear"), ("hunyuan_dit", "layer_stream")}


pytestmark = pytest.mark.usefixtures("small_activations")


def loss(inputs: dict, model: nn.Module) -> Tensor:
    return loss_of(model(**fresh(inputs)))


@pytest.mark.parametrize(("name", "mode", "by_collectives"), CASES)
def test_two_processes_have_the_gradients_of_one(
    name: str, mode: str, by_collectives: bool, monkeypatch: pytest.MonkeyPatch
):
    if by_collectives:
        use_collectives(monkeypatch)
    # Without dropout, which draws, too.
    model = built(name).eval()
    losses = [[partial(loss, ARCHITECTURES[name].inputs()) for _ in range(2)] for _ in range(STEPS)]
    same_as_one_process(model, MODES[mode][0], losses)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in SHIFTED else pytest.mark.slow)
        # Batch norm on one pixel of one sample.
        for name in SMALL
        if name != "kandinsky3"
        for mode in OF_DIFFUSERS
    ],
)
def test_two_processes_with_one_sample_each(monkeypatch: pytest.MonkeyPatch, name: str, mode: str):
    # A bucket for each gradient that stays, so that most are summed before backward ends.
    monkeypatch.setattr(slices.gradient_buckets, "__defaults__", (1, 1))
    noisy, condition = inputs_of(name)

    def loss(sample: int, step: int, model: nn.Module) -> Tensor:
        own = slice(sample, sample + 1)
        velocity = model(noisy[own] / (step + 1), TIMES[own], **{key: value[own] for key, value in condition.items()})
        return velocity.square().mean()

    losses = [[partial(loss, sample, step) for sample in range(2)] for step in range(STEPS)]
    same_as_one_process(small(name), OF_DIFFUSERS[mode], losses)
