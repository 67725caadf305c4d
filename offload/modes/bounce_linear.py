"""bounce_linear: every linear and convolution layer streams by itself.

The weights of a layer come in for its forward, again for its backward, and leave at once: the idea of RamTorch and
of ai-toolkit's memory manager. Embeddings, norms and bare parameters stay on the device, or stream with the next layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from offload.modes.weight_mode import WeightMode
from offload.runtime.knobs import choice
from offload.weights.partition import CutPoint

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Their forward reads the weights of the layers inside them without calling those layers.
ATOMIC = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(kw_only=True, eq=False)
class BounceLinear(WeightMode):
    """Streams Linear and Conv layers one by one, subclasses too. A unit is one layer.

    Args:
        outside: every other parameter (embeddings, norms) is resident, or streams in the unit of the layer that follows
            it in the order of the model (of the last layer, if none follows).
    """

    outside: str = choice("resident", "stream")

    def cut_points(self, model: nn.Module) -> Iterable[CutPoint]:
        points = list(_layers_and_owners(model, ""))
        names = [point.name for point in points if point.deep]
        for point in points:
            if point.deep:
                names = names[1:] or [point.name]
                yield point
            elif self.outside == "stream" and names:
                yield CutPoint(names[0], point.module, deep=False)


def _layers_and_owners(module: nn.Module, path: str) -> Iterable[CutPoint]:
    """Yields the layers, deep, and every other module that owns tensors, not deep, in the order of the model."""
    name = path or type(module).__name__
    if isinstance(module, LAYERS + ATOMIC):
        yield CutPoint(name, module)
        return
    if any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values())):
        yield CutPoint(name, module, deep=False)
    for child_name, child in module.named_children():
        yield from _layers_and_owners(child, f"{path}.{child_name}" if path else child_name)
