"""layer_stream: every block of the model streams as a whole.

The blocks of a ModuleList are the units, parameters and buffers together, fetched a few ahead of use: the idea of
LTX's layer streaming, here for training as well. Everything outside the blocks stays on the device, or streams too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from offload.blocks import find_blocks, outside_blocks
from offload.knobs import knob
from offload.modes.weight_mode import WeightMode
from offload.weights.units.partition import CutPoint, join_small


@dataclass(kw_only=True, eq=False)
class LayerStream(WeightMode):
    """Streams the blocks of a model. A unit is one block.

    Args:
        layers: dotted path of the list of blocks, such as model.layers; null finds all lists of blocks.
        outside: the modules outside the blocks (embedding, head, final norm) are resident, or stream, each as a unit of
            its own; small ones join a neighbour's (see `offload.weights.units.partition`).
        slots: blocks that fit on the device at a time, each in a buffer as large as the largest.
        prefetch: blocks fetched ahead of the one that computes: below slots; null is as many as the slots allow.
        resident: stays on the device after all, the first blocks and others spread evenly: a number of blocks (8), a
            share of the bytes (25%), or bytes (2GiB).
        include, exclude: patterns over the names of the blocks, such as model.layers.1*. What matches an
            include pattern streams, everything where none is given, but not what matches an exclude pattern.
        trained: parameters that train stream with the rest, or stay on the device, as small ones beside frozen weights
            may; then nothing that streams has gradients.
        pin: auto page-locks the host memory, which copies five times as fast; "off" (quoted) takes pageable memory.
        source: weights that stream wait in host memory; or blocks that are frozen as a whole stay in their safetensors
            files (mapped), from which threads read them ahead of use, through the host memory of four blocks.
    """

    layers: str | None = knob(None)
    outside: Literal["resident", "stream"] = knob("resident")
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
