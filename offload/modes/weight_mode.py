"""What modes that stream weights have in common: knobs, plan, attach, step, detach. A mode adds where it cuts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase

from torch import Tensor, nn

from offload.microbatches.layer_major import one_after_another
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.overlap import Overlap
from offload.runtime.registry import Streams
from offload.weights.footprint import Footprint
from offload.weights.partition import CutModel, CutPoint, cut, keep_on_device, open_at_once
from offload.weights.streamer import WeightStreamer


def one_of(key: str, value: str, *choices: str) -> str:
    """The value of the knob `key`. Raises ValueError naming the choices if it is none of them."""
    if value not in choices:
        raise ValueError(f"offload.{key}={value}: must be {' or '.join(choices)}")
    return value


class WeightMode(ABC):
    """Streams the units at the root modules that `cut_points` names.

    `slots` is the number of units that fit on the device at a time, `prefetch` how many are fetched ahead (None: as
    many as the slots allow, slots - 1). `resident` is how much of what would stream stays on the device after all: a
    number of units (`8`), a share of their bytes (`25%`) or bytes (`2GiB`), spread evenly. `include` and `exclude`
    are patterns over module names (`model.layers.*.mlp.*`): a root streams when it matches an `include` pattern, or
    none is given, and no `exclude` pattern. `pin` is "auto" (page-lock host memory) or "off".
    Raises ValueError naming the key for a value out of range.
    """

    # Whether the mode itself computes blocks again in backward.
    recomputes = False

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
        self._slots, self._prefetch, self._resident = slots, prefetch, resident
        self._pin = one_of("pin", pin, "auto", "off") == "auto"
        self._include, self._exclude = tuple(include), tuple(exclude)
        self._streamer: WeightStreamer | None = None
        self._overlap: Overlap | None = None

    @abstractmethod
    def cut_points(self, model: nn.Module) -> Iterable[CutPoint]:
        """The modules at which the mode cuts `model`, none inside another."""

    def grouped(self, cut_points: Sequence[CutPoint]) -> Sequence[CutPoint]:
        """The cut_points, renamed where several are to make one unit."""
        return cut_points

    def footprint(self, model: nn.Module, recompute: bool = False) -> Footprint:
        """What `attach` will hold and a step will move, in bytes; touches nothing."""
        streamed = self._cut(model)
        return Footprint.of(streamed, self._slots_for(streamed), recompute)

    def attach(self, model: nn.Module, streams: Streams) -> None:
        """Takes `model` over: its units go to host memory, the rest to the device of `streams`.

        Tensors on the meta device become memory where they belong, to be initialised there. Raises RuntimeError when
        a model is attached already, MemoryError where the host has no room.
        """
        if self._streamer is not None:
            raise RuntimeError("this mode holds a model already: detach it, or make a second mode")
        streamed = self._cut(model)
        slots = self._slots_for(streamed)
        prefetch = min(self._prefetch, slots - 1)
        self._streamer = WeightStreamer(streamed, streams, slots=slots, prefetch=prefetch, pin=self._pin)

    def step(self, norms: bool = False) -> AbstractContextManager:
        """Around forward and backward of one step; afterwards gradients are readable on the host.

        `norms`: those of the gradients are wanted (`gradient_norms`).
        """
        return self._streamer.step(norms)

    def gradient_norms(self) -> dict[nn.Parameter, Tensor]:
        """L2 norms of the step's gradients that were taken on the device: float32 scalars there."""
        return self._streamer.gradient_norms()

    def accumulate(self, losses: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Inside a step: computes every loss and the gradients of all. Returns the losses, detached."""
        return one_after_another(losses, self._streamer.last_microbatch)

    def overlap(self, optimizer: HostAdamW, early: bool, device_share: int = 0) -> None:
        """Hides the updates of `optimizer` behind the step; see `Overlap`."""
        if self._overlap is not None:
            self._overlap.close()
        self._overlap = Overlap(optimizer, self._streamer, early, device_share)
        self._streamer.use_updates(self._overlap)

    def place_states(self, nbytes: int) -> None:
        """Between steps: optimizer states of the first units that fit into `nbytes` live on the device from now on."""
        self._overlap.place_states(nbytes)

    def detach(self) -> None:
        """Gives the model back as it was found."""
        self._streamer.detach()
        self._streamer = self._overlap = None

    def counters(self) -> dict[str, float]:
        """Bytes and ms since `attach`, and the host bytes held now, page-locked and not."""
        return self._streamer.counters()

    def chosen(self, model: nn.Module) -> Sequence[CutPoint]:
        """The cut_points that `include` and `exclude` leave, named by their units."""
        return self.grouped([root for root in self.cut_points(model) if self._selects(root.name)])

    def _cut(self, model: nn.Module) -> CutModel:
        streamed = keep_on_device(cut(model, self.chosen(model)), self._resident)
        together = open_at_once(model, streamed.windows)
        if self._slots < len(together):
            names = " and ".join(unit.name for unit in together[:3])
            raise ValueError(
                f"offload.slots={self._slots}: must be at least {len(together)}, because {names} are used together"
            )
        return streamed

    def _slots_for(self, streamed: CutModel) -> int:
        # More than there are units would only take memory.
        return min(self._slots, max(len(streamed.units), 1))

    def _selects(self, name: str) -> bool:
        included = not self._include or any(fnmatchcase(name, pattern) for pattern in self._include)
        return included and not any(fnmatchcase(name, pattern) for pattern in self._exclude)
