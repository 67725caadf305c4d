"""layer_stream: every block of the model streams as a whole.

The blocks of a ModuleList are the units, parameters and buffers together, fetched a few ahead of use: the idea of
LTX's layer streaming, here for training as well. Everything outside the blocks stays on the device, or streams too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from offload.blocks import find_blocks, outside_blocks
from offload.knobs import choice, knob
from offload.modes.weight_mode import WeightMode
from offload.weights.units.joining import join_small
from offload.weights.units.partition import CutPoint


@dataclass(kw_only=True, eq=False)
class LayerStream(WeightMode):
    """Streams the blocks of a model. A unit is one block.

    Args:
        layers: dotted path of the list of blocks, such as model.layers; null finds all lists of blocks.
        outside: the modules outside the blocks (embedding, head, final norm) are resident, or stream, each as a unit of
            its own; small ones join a neighbour's (see `offload.weights.units.joining`).
    """

    layers: str | None = knob(None)
    outside: str = choice("resident", "stream")
    slots: int = knob(3, at_least=1)

    def cut_points(self, model: nn.Module) -> Iterable[CutPoint]:
        blocks = find_blocks(model, self.layers, key="layers")
        yield from (CutPoint(name, block) for name, block in blocks)
        if self.outside == "stream":
            outside = outside_blocks(model, [block for _, block in blocks])
            yield from (CutPoint(name, module, deep=False) for name, module in outside)

    def chosen(self, model: nn.Module) -> Sequence[CutPoint]:
        """Returns the cut points that `include` and `exclude` leave; small modules outside the blocks join others.

        Raises ValueError for a model that cannot be cut; see `offload.weights.units.partition.cut`.
        """
        points = super().chosen(model)
        return join_small(model, points) if self.outside == "stream" else points
