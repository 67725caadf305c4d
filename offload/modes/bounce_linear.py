"""bounce_linear: every linear and convolution layer visits the device by itself.

The weights of a layer come in for its forward, again for its backward, and leave at once, the idea of RamTorch and
of ai-toolkit's memory manager. Embeddings, norms and bare parameters stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from offload.weight_mode import WeightMode

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Their forward reads the weights of the layers inside them without calling those layers.
ATOMIC = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class BounceLinear(WeightMode):
    """Streams Linear and Conv layers one by one, subclasses too. The knobs are those of `WeightMode`."""

    def roots(self, model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        return _layers(model, "")


def _layers(module: nn.Module, name: str) -> Iterable[tuple[str, nn.Module]]:
    if isinstance(module, LAYERS + ATOMIC):
        yield name or type(module).__name__, module
        return
    for child_name, child in module.named_children():
        yield from _layers(child, f"{name}.{child_name}" if name else child_name)
