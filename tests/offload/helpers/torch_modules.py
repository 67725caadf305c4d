"""The modules of torch's own database of them, and the comparison of each with the resident one under every mode."""

import torch
from torch import nn
from torch.testing._internal.common_modules import ModuleInfo, module_db

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from tests.offload.helpers.foreign import InBlock, same_as_resident, trained

MODES = {
    "bounce_linear": lambda: BounceLinear(outside="stream", slots=8),
    "layer_stream": lambda: LayerStream(slots=2),
    "shard_offload": lambda: ShardOffload(shards=1),
    "tensor_swap": lambda: TensorSwap(Resident()),
    "layer_stream_swap": lambda: TensorSwap(LayerStream(slots=2)),
}


# The samples in the database for these are of another dtype than their inputs, which no module takes.
WITHOUT_SAMPLES = {"nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d"}
MODULES = [info for info in module_db if info.name not in WITHOUT_SAMPLES and not info.name.startswith("nn.Lazy")]
LAZY = [info for info in module_db if info.name.startswith("nn.Lazy")]


def samples(info: ModuleInfo) -> list:
    """The first and the last of a module's samples: the plainest, and one with options."""
    options = {"device": "cpu", "dtype": torch.float32, "requires_grad": True, "training": True}
    given = [case for case in info.module_inputs_func(info, **options) if case.forward_input is not None]
    return list({id(case): case for case in (given[0], given[-1])}.values())


def built(info: ModuleInfo, case) -> nn.Module:
    torch.manual_seed(0)
    return InBlock(info.module_cls(*case.constructor_input.args, **case.constructor_input.kwargs).train())


def check(info: ModuleInfo, device: str = "cpu") -> None:
    """A module trains under every mode as it does resident, bit for bit."""
    for case in samples(info):
        calls = [(case.forward_input.args, case.forward_input.kwargs)] * 2
        expected, _ = trained(built(info, case), Resident(), calls, device=device)
        for make in MODES.values():
            same_as_resident(built(info, case), make(), calls, device=device, expected=expected)
