"""layer_stream: every block of the model visits the device as a whole.

The blocks of a ModuleList are the units, parameters and buffers together, fetched a few ahead of use: the idea of
LTX's layer streaming, here for training as well. What is outside the blocks stays on the device, or streams too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from offload.modes.weight_mode import WeightMode, one_of
from offload.runtime.blocks import find_blocks
from offload.weights.partition import CutPoint


class LayerStream(WeightMode):
    """Streams the blocks of a model, by default three slots of them; the other knobs are those of `WeightMode`.

    `layers` is the dotted path of the list of blocks (None: found by itself). `outside` says what the modules
    outside the blocks do (embedding, head, final norm): "resident", or "stream", each as a unit of its own.
    """

    def __init__(
        self,
        layers: str | None = None,
        outside: str = "resident",
        slots: int = 3,
        prefetch: int | None = None,
        resident: str | int = 0,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        pin: str = "auto",
    ):
        super().__init__(slots, prefetch, resident, include, exclude, pin)
        self._layers = layers
        self._outside_streams = one_of("outside", outside, "resident", "stream") == "stream"

    def cut_points(self, model: nn.Module) -> Iterable[CutPoint]:
        blocks = find_blocks(model, self._layers, key="offload.layers")
        yield from (CutPoint(name, block) for name, block in blocks)
        if self._outside_streams:
            yield from _outside(model, {block for _, block in blocks})


def _outside(model: nn.Module, blocks: set[nn.Module]) -> Iterable[CutPoint]:
    """The modules that own parameters and are in no block."""
    inside = {module for block in blocks for module in block.modules()}
    for name, module in model.named_modules():
        if module not in inside and next(module.parameters(recurse=False), None) is not None:
            yield CutPoint(name or type(module).__name__, module, deep=False)
