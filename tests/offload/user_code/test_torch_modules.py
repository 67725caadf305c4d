"""The modules of torch's own database of them, each under every mode, equal to the resident module bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.common_modules import ModuleInfo, module_db

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from tests.offload.helpers.foreign import InBlock, same_as_resident

MODES = {
    "bounce_linear": lambda: BounceLinear(outside="stream", slots=8),
    "layer_stream": lambda: LayerStream(slots=2),
    "shard_offload": lambda: ShardOffload(shards=1),
    "tensor_swap": lambda: TensorSwap(Resident(), min_bytes=1),
    "layer_stream_swap": lambda: TensorSwap(LayerStream(slots=2), min_bytes=1),
}


# The samples in the database for these are of another dtype than their inputs, which no module takes.
WITHOUT_SAMPLES = {"nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d"}
MODULES = [info for info in module_db if info.name not in WITHOUT_SAMPLES]


@pytest.mark.parametrize("info", MODULES, ids=lambda info: info.name)
def test_a_module_trains_as_it_does_resident(info: ModuleInfo):
    options = {"device": "cpu", "dtype": torch.float32, "requires_grad": True, "training": True}
    given = [case for case in info.module_inputs_func(info, **options) if case.forward_input is not None]
    if info.name.startswith("nn.Lazy"):
        model = InBlock(info.module_cls(*given[0].constructor_input.args, **given[0].constructor_input.kwargs))
        with pytest.raises(ValueError, match="has no shape yet: run the model once"):
            LayerStream().footprint(model)
        return
    # The first and the last: the plainest, and one with options.
    for case in {id(case): case for case in (given[0], given[-1])}.values():
        for make in MODES.values():
            torch.manual_seed(0)
            module = info.module_cls(*case.constructor_input.args, **case.constructor_input.kwargs).train()
            calls = [(case.forward_input.args, case.forward_input.kwargs)] * 2
            same_as_resident(InBlock(module), make(), calls)
