"""bounce_linear: every linear and convolution layer visits the device by itself.

The weights of a layer come in for its forward, again for its backward, and leave at once, the idea of RamTorch and
of ai-toolkit's memory manager. Embeddings, norms and bare parameters stay on the device, or travel with the next layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from offload.modes.weight_mode import WeightMode, one_of
from offload.weights.partition import CutPoint

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Their forward reads the weights of the layers inside them without calling those layers.
ATOMIC = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class BounceLinear(WeightMode):
    """Streams Linear and Conv layers one by one, subclasses too; the other knobs are those of `WeightMode`.

    `outside` says what every other parameter does: "resident", or "stream", in the unit of the layer that follows it
    in the order of the model (of the last layer, if none follows).
    """

    def __init__(
        self,
        outside: str = "resident",
        slots: int = 4,
        prefetch: int | None = None,
        resident: str | int = 0,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        pin: str = "auto",
    ):
        super().__init__(slots, prefetch, resident, include, exclude, pin)
        self._outside_streams = one_of("outside", outside, "resident", "stream") == "stream"

    def cut_points(self, model: nn.Module) -> Iterable[CutPoint]:
        cut_points = list(_parts(model, ""))
        names = [root.name for root in cut_points if root.deep]
        for root in cut_points:
            if root.deep:
                names = names[1:] or [root.name]
                yield root
            elif self._outside_streams and names:
                yield CutPoint(names[0], root.module, deep=False)


def _parts(module: nn.Module, path: str) -> Iterable[CutPoint]:
    """The layers, deep, and every other module that owns tensors, not deep, in the order of the model."""
    name = path or type(module).__name__
    if isinstance(module, LAYERS + ATOMIC):
        yield CutPoint(name, module)
        return
    if any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values())):
        yield CutPoint(name, module, deep=False)
    for child_name, child in module.named_children():
        yield from _parts(child, f"{path}.{child_name}" if path else child_name)
