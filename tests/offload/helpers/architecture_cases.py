"""Every tiny architecture, the modes that are tried on it, and the comparison with the resident model."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Mode
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from tests.offload.helpers.architectures import ADAPTED, DECODERS, ENCODERS, VISION_AND_AUDIO
from tests.offload.helpers.diffusion_architectures import DIFFUSION
from tests.offload.helpers.foreign import same_as_resident
from tests.offload.helpers.small import swap_small

ARCHITECTURES = DECODERS | ENCODERS | VISION_AND_AUDIO | DIFFUSION | ADAPTED

# Modes that stream layers or blocks, with slots for as many units as these models use at once.
STREAMING: dict[str, Callable[[], Mode]] = {
    "bounce_linear": lambda: BounceLinear(slots=8),
    "bounce_linear_all": lambda: BounceLinear(outside="stream", slots=8),
    "layer_stream": lambda: LayerStream(slots=2),
    "layer_stream_all": lambda: LayerStream(outside="stream", slots=4),
}
# Modes with the number of microbatches that they accumulate; None: forward and backward by hand.
MODES: dict[str, tuple[Callable[[], Mode], int | None]] = {
    **{name: (make, None) for name, make in STREAMING.items()},
    "shard_offload": (lambda: ShardOffload(shard_bytes="16KiB"), 1),
    "shard_offload_2": (lambda: ShardOffload(shard_bytes="16KiB"), 2),
    "shard_offload_all": (lambda: ShardOffload(outside="stream", shard_bytes="16KiB", slots=4), 2),
    "tensor_swap": (lambda: TensorSwap(Resident()), None),
    "layer_stream_swap": (lambda: TensorSwap(LayerStream(slots=2)), None),
}


def built(name: str) -> nn.Module:
    """The model of an architecture, in training, with the same weights each time."""
    torch.manual_seed(0)
    return ARCHITECTURES[name].build().train()


def check(name: str, mode: str, device: str = "cpu") -> None:
    """An architecture trains under a mode for two steps, and everything is as for the resident model, bit for bit.

    But for one thing: where several microbatches run layer-major and a forward uses a parameter more than once, its
    gradients are summed in another order (docs/engine.md).
    """
    architecture, (make, microbatches) = ARCHITECTURES[name], MODES[mode]
    model = built(name)
    calls = [((), architecture.inputs()) for _ in range(2 * (microbatches or 1))]
    exact = microbatches != 2 or not architecture.shares
    with pytest.MonkeyPatch.context() as patch:
        swap_small(patch)
        counters = same_as_resident(model, make(), calls, microbatches, device, exact)
    assert counters.h2d_bytes
    assert counters.d2h_bytes
    swaps = mode.startswith("shard") or mode.endswith("swap")
    assert bool(counters.activation_d2h_bytes) == swaps
    # On a GPU backward may find an activation still there, because its copy out has not ended.
    if device == "cpu":
        assert bool(counters.activation_h2d_bytes) == swaps
