"""bounce_linear: every linear and convolution layer visits the device by itself.

The weights of a layer come in for its forward, again for its backward, and leave at once, the idea of RamTorch and
of ai-toolkit's memory manager. Embeddings, norms and bare parameters stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase

from torch import nn

from offload.plan import Plan
from offload.registry import Streams
from offload.streaming import WeightStreaming
from offload.unit import CutModel, cut, keep_on_device

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Their forward reads the weights of the layers inside them without calling those layers.
ATOMIC = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class BounceLinear:
    """Streams Linear and Conv layers one by one, subclasses too.

    `slots` is the number of layers that fit on the device at a time, `prefetch` how many layers ahead are
    fetched (None: as many as the slots allow, slots - 1).
    `resident` is how much of what would stream stays on the device after all: a number of layers (`8`), a share of
    the bytes (`25%`) or bytes (`2GiB`), spread evenly.
    `include` and `exclude` are patterns over module names (`model.layers.*.mlp.*`): a layer streams when it matches
    an `include` pattern, or none is given, and no `exclude` pattern. `pin` is "auto" or "off".
    Raises ValueError naming the key for a value out of range.
    """

    def __init__(
        self,
        slots: int = 4,
        prefetch: int | None = None,
        resident: str | int = 0,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        pin: str = "auto",
    ):
        if slots < 1:
            raise ValueError(f"offload.slots={slots}: must be at least 1")
        prefetch = slots - 1 if prefetch is None else prefetch
        if not 0 <= prefetch < slots:
            raise ValueError(f"offload.prefetch={prefetch}: must be between 0 and slots - 1 = {slots - 1}")
        if pin not in ("auto", "off"):
            raise ValueError(f"offload.pin={pin}: must be auto or off")
        self._slots, self._prefetch, self._pin, self._resident = slots, prefetch, pin == "auto", resident
        self._include, self._exclude = tuple(include), tuple(exclude)
        self._streaming: WeightStreaming | None = None

    def plan(self, model: nn.Module, recompute: bool = False) -> Plan:
        """What `attach` will hold and a step will move, in bytes; touches nothing."""
        return Plan.of(self._cut(model), self._slots, recompute)

    def attach(self, model: nn.Module, streams: Streams) -> None:
        """Takes `model` over: its layers go to host memory, the rest to the device of `streams`.

        Parameters on the meta device become host memory filled with zeros, to be initialised where they are.
        Raises RuntimeError when a model is attached already, MemoryError where the host has no room.
        """
        if self._streaming is not None:
            raise RuntimeError("bounce_linear holds a model already: detach it, or make a second mode")
        self._streaming = WeightStreaming(
            model, self._cut(model), streams, slots=self._slots, prefetch=self._prefetch, pin=self._pin
        )

    def step(self) -> AbstractContextManager:
        """Around forward and backward of one step; afterwards gradients are readable on the host."""
        return self._streaming.step()

    def detach(self) -> None:
        """Gives the model back as it was found."""
        self._streaming.detach()
        self._streaming = None

    def counters(self) -> dict[str, float]:
        """Bytes and ms since `attach`, and the page-locked bytes held now."""
        return self._streaming.counters()

    def _cut(self, model: nn.Module) -> CutModel:
        layers = [(name, module) for name, module in _layers(model, "") if self._streams(name)]
        return keep_on_device(cut(model, layers), self._resident)

    def _streams(self, name: str) -> bool:
        included = not self._include or any(fnmatchcase(name, pattern) for pattern in self._include)
        return included and not any(fnmatchcase(name, pattern) for pattern in self._exclude)


def _layers(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    if isinstance(module, LAYERS + ATOMIC):
        return [(name or type(module).__name__, module)]
    found = []
    for child_name, child in module.named_children():
        found += _layers(child, f"{name}.{child_name}" if name else child_name)
    return found
