"""layer_stream: every block of the model streams as a whole.

The blocks of a ModuleList are the units, parameters and buffers together, fetched a few ahead of use: the idea of
LTX's layer streaming, here for training as well. Everything outside the blocks stays on the device, or streams too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from offload.modes.weight_mode import WeightMode
from offload.runtime.blocks import find_blocks
from offload.runtime.knobs import choice, knob
from offload.weights.partition import CutPoint


@dataclass(kw_only=True, eq=False)
class LayerStream(WeightMode):
    """Streams the blocks of a model. A unit is one block.

    Args:
        layers: dotted path of the list of blocks, such as model.layers; null finds all lists of blocks.
        outside: the modules outside the blocks (embedding, head, final norm) are resident, or stream, each as a unit of
            its own.
    """

    layers: str | None = knob(None)
    outside: str = choice("resident", "stream")
    slots: int = knob(3, at_least=1)

    def cut_points(self, model: nn.Module) -> Iterable[CutPoint]:
        blocks = find_blocks(model, self.layers, key="layers")
        yield from (CutPoint(name, block) for name, block in blocks)
        if self.outside == "stream":
            yield from _outside(model, {block for _, block in blocks})


def _outside(model: nn.Module, blocks: set[nn.Module]) -> Iterable[CutPoint]:
    """Yields the modules that own parameters and are in no block."""
    inside = {module for block in blocks for module in block.modules()}
    for name, module in model.named_modules():
        if module not in inside and next(module.parameters(recurse=False), None) is not None:
            yield CutPoint(name or type(module).__name__, module, deep=False)
