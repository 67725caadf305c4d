"""bounce_linear: every linear and convolution layer, and every other with a matrix of its own, streams by itself.

The weights of a layer come in for its forward, again for its backward, and leave at once: the idea of RamTorch and
of ai-toolkit's memory manager. Embeddings, norms and bare parameters stay on the device, or stream with the next layer.
Layers of less than a megabyte, such as low-rank adapters, travel with a neighbour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from offload.knobs import knob
from offload.modes.weight_mode import WeightMode
from offload.weights.units.partition import CutPoint, join_small

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Their forward reads the weights of the layers inside them without calling those layers.
ATOMIC = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
# They look up the rows of their matrix.
TABLES = (nn.Embedding, nn.EmbeddingBag)


@dataclass(kw_only=True, eq=False)
class BounceLinear(WeightMode):
    """Streams Linear and Conv layers one by one, subclasses too. A unit is one layer; small ones join a neighbour's.

    Other modules that compute with a matrix are layers as well: recurrent ones, the experts of a mixture in one tensor,
    those of other packages. Which layers are small, and whose unit they join: see `offload.weights.units.partition`.

    Args:
        outside: every other parameter (embeddings, norms) is resident, or streams in the unit of the layer that follows
            it in the order of the model (of the last layer, if none follows).
        slots: layers that fit on the device at a time, each in a buffer as large as the largest.
        prefetch: layers fetched ahead of the one that computes: below slots; null is as many as the slots allow.
        resident: stays on the device after all, the first layers and others spread evenly: a number of layers (8), a
            share of the bytes (25%), or bytes (2GiB).
        include, exclude: patterns over the names of the layers, such as model.layers.1*. What matches an
            include pattern streams, everything where none is given, but not what matches an exclude pattern.
        trained: parameters that train stream with the rest, or stay on the device, as small ones beside frozen weights
            may; then nothing that streams has gradients.
        pin: auto page-locks the host memory, which copies five times as fast; "off" (quoted) takes pageable memory.
        source: weights that stream wait in host memory; or layers that are frozen as a whole stay in their safetensors
            files (mapped), from which threads read them ahead of use, through the host memory of four layers.
    """

    outside: Literal["resident", "stream"] = knob("resident")

    def cut_points(self, model: nn.Module) -> Iterable[CutPoint]:
        points = list(_layers_and_owners(model, ""))
        names = [point.name for point in points if point.deep]
        for point in points:
            if point.deep:
                names = names[1:] or [point.name]
                yield point
            elif self.outside == "stream" and names:
                yield CutPoint(names[0], point.module, deep=False)

    def chosen(self, model: nn.Module) -> Sequence[CutPoint]:
        """Returns the cut points that `include` and `exclude` leave, those of small layers joined to their neighbours'.

        Raises ValueError for a model that cannot be cut; see `offload.weights.units.partition.cut`.
        """
        return join_small(model, super().chosen(model))


def _is_other_layer(module: nn.Module) -> bool:
    """Tells whether `module` has a matrix, a forward, and no tensors in modules inside it."""
    own = {*module.parameters(recurse=False), *module.buffers(recurse=False)}
    return (
        any(tensor.ndim > 1 for tensor in own if isinstance(tensor, nn.Parameter))
        and own.issuperset((*module.parameters(), *module.buffers()))
        and not isinstance(module, TABLES)
        # Containers of parameters have none: other modules read what they hold.
        and type(module).forward is not nn.Module.forward
    )


def _layers_and_owners(module: nn.Module, path: str) -> Iterable[CutPoint]:
    """Yields the layers, deep, and every other module that owns tensors, not deep, in the order of the model."""
    name = path or type(module).__name__
    if isinstance(module, LAYERS + ATOMIC) or _is_other_layer(module):
        yield CutPoint(name, module)
        return
    if any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values())):
        yield CutPoint(name, module, deep=False)
    for child_name, child in module.named_children():
        yield from _layers_and_owners(child, f"{path}.{child_name}" if path else child_name)
