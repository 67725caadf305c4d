"""Weight streaming: units live on the host, visit the device while they are used, and send their gradients home.

One mechanism at every granularity. Around the forward of a module that uses a unit, a window is open: the module
holds device stand-ins of its parameters, and the weights that autograd saves are saved by name (`saved_weights`).
In backward the saved names bring units back, and gradients leave as they are made (`gradients`). Outside a step the
module holds its host parameters, so optimizers, checkpoints and `state_dict` need nothing new.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from offload.gradients import GradientOffloader
from offload.memory import DeviceSlot, DeviceSlots, HostArena
from offload.onloading import Onloader
from offload.registry import Streams
from offload.residency import Residency
from offload.saved_weights import SavedWeights
from offload.telemetry import Telemetry
from offload.transfer import Transfer
from offload.unit import CutModel, OffloadUnit, UnitTensor, Window

# Gradients that may wait on the device for the bus, in units of the largest unit.
GRADIENT_SLOTS = 2


class WeightStreaming:
    """A model whose units stream between the host and one device.

    Takes the model over on construction and gives it back with `detach`. Raises MemoryError where the host has no
    room for the units, ValueError for fewer than one slot.
    """

    def __init__(
        self,
        cut: CutModel,
        streams: Streams,
        *,
        slots: int,
        prefetch: int,
        pin: bool = True,
        poison: bool | None = None,
    ):
        if slots < 1:
            raise ValueError(f"slots={slots}: at least one device slot is needed")
        self.telemetry = Telemetry(streams)
        self._streams = streams
        self._cut = cut
        self.arena = HostArena(streams.device, pin)
        for unit in cut.units:
            unit.bring_home(self.arena)
        self._residency = Residency(cut.resident, streams.device)
        largest = max((unit.nbytes for unit in cut.units), default=0)
        self._slots = DeviceSlots(slots, largest, streams)
        transfer = Transfer(streams, self.telemetry)
        poison = not streams.asynchronous if poison is None else poison
        self._onloader = Onloader(cut.units, self._slots, transfer, prefetch, poison)
        self._gradients = GradientOffloader(transfer, GRADIENT_SLOTS * largest)
        self._saved = SavedWeights(self._slots, self._onloader)
        self._in_step = False
        self._hooks = [_WindowHooks(self, window) for window in cut.windows]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the forward and backward passes of one step, of one or of several microbatches.

        Afterwards gradients are readable on the host and nothing is in flight; that holds after an exception too.
        Raises RuntimeError when a step is open already.
        """
        if self._in_step:
            raise RuntimeError("a step is open already: close it before the next")
        self._in_step = True
        for unit in self._cut.units:
            self._streams.writes(None, unit.weights, "the optimizer's update")
        self._onloader.begin_step()
        try:
            yield
        finally:
            self._in_step = False
            self._close_windows()
            self._onloader.end_step()
            self._settle()
            self.telemetry.collect()

    def detach(self) -> None:
        """Gives the model back: no hooks, parameters where they were found (host memory for meta ones)."""
        if self._in_step:
            raise RuntimeError("detach inside a step: close the step first")
        for hooks in self._hooks:
            hooks.remove()
        # They refer back to this object: without them the device memory goes with its last reference.
        self._hooks.clear()
        self._onloader.drop()
        self._streams.synchronize()
        for unit in self._cut.units:
            self._streams.writes(None, unit.weights, "the model's next owner")
        self._residency.restore()
        self.arena.close()

    def counters(self) -> dict[str, float]:
        """Totals since construction (bytes copied each way, ms that compute stood still) and page-locked bytes."""
        return {
            "h2d_bytes": self.telemetry.h2d_bytes,
            "d2h_bytes": self.telemetry.d2h_bytes,
            "stall_ms": self.telemetry.stall_ms,
            "host_pinned_bytes": self.arena.pinned_bytes,
            "host_pageable_bytes": self.arena.pageable_bytes,
        }

    def open(self, window: Window) -> AbstractContextManager:
        """Brings the window's units to the device and installs them; returns the context that forward needs."""
        if torch.is_grad_enabled() and not self._in_step and self._trains(window):
            raise RuntimeError(
                "forward with gradients outside a step: wrap forward and backward in `with mode.step():`,"
                " or evaluation in torch.no_grad()"
            )
        opened = []
        try:
            for unit in window.units:
                slot = self._onloader.visit(unit)
                unit.open_windows += 1
                opened.append(unit)
                if unit.open_windows == 1:
                    for tensor in unit.tensors:
                        tensor.install(self._stand_in(tensor, slot))
        except BaseException:
            self._close_units(opened)
            raise
        return self._saved.hooks()

    def close(self, window: Window) -> None:
        """The forward of the window's module is over."""
        self._close_units(window.units)

    def _close_units(self, units: Iterable[OffloadUnit]) -> None:
        for unit in units:
            unit.open_windows -= 1
            if unit.open_windows:
                continue
            self._write_back(unit)
            for tensor in unit.tensors:
                tensor.install(tensor.host)
            if not self._in_step:
                # Between steps the weights at home may change at any time: nothing of them is kept.
                self._onloader.forget(unit)
                unit.drop_stand_ins()

    @staticmethod
    def _trains(window: Window) -> bool:
        return any(tensor.trains for unit in window.units for tensor in unit.tensors)

    def _stand_in(self, tensor: UnitTensor, slot: DeviceSlot) -> torch.Tensor:
        with torch.inference_mode(False):
            # `.data` has a version counter of its own, which tells whether forward updated a buffer.
            view = tensor.view_of(slot.bytes).data
            if tensor.is_buffer:
                tensor.device = view
            elif tensor.device is not None:
                # One leaf a step: autograd sums the gradients of all its uses before they leave, as it would for a
                # resident parameter.
                tensor.device.data = view
            else:
                tensor.device = nn.Parameter(view, requires_grad=tensor.trains)
                if tensor.trains:
                    tensor.device.register_post_accumulate_grad_hook(functools.partial(self._land, tensor))
        return tensor.device

    def _write_back(self, unit: OffloadUnit) -> None:
        for tensor in unit.tensors:
            if not tensor.is_buffer:
                continue
            place = tensor.places[0]
            replaced = place.held is not tensor.device
            if replaced:
                tensor.device.copy_(place.held)
            # Running statistics are updated by kernels that do not declare it: no version counter tells.
            counts = isinstance(place.module, _NormBase) and place.module.training
            if replaced or counts or tensor.device._version:
                self._onloader.write_home(unit, tensor)

    def _land(self, tensor: UnitTensor, leaf: nn.Parameter) -> None:
        self._gradients.land(tensor, leaf)
        if not self._in_step:
            self._settle()

    def _close_windows(self) -> None:
        for hooks in self._hooks:
            hooks.abandon()
        for unit in self._cut.units:
            unit.drop_stand_ins()

    def _settle(self) -> None:
        self._gradients.let_go()
        # Not only the gradients: a unit fetched ahead and not used is still being read at home.
        self._streams.synchronize()
        for unit in self._cut.units:
            for tensor in unit.tensors:
                if tensor.trains:
                    self._streams.reads(None, tensor, "the optimizer's update")


class _WindowHooks:
    """The forward hooks of one window."""

    def __init__(self, streaming: WeightStreaming, window: Window):
        self._streaming = streaming
        self._window = window
        self._contexts: list[AbstractContextManager] = []
        self._handles = (
            window.module.register_forward_pre_hook(_Hook(self._open), prepend=True),
            window.module.register_forward_hook(_Hook(self._close), always_call=True),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def abandon(self) -> None:
        """Closes what an interrupted forward left open."""
        while self._contexts:
            self._close()

    def _open(self, *_: object) -> None:
        context = self._streaming.open(self._window)
        context.__enter__()
        self._contexts.append(context)

    def _close(self, *_: object) -> None:
        if self._contexts:
            self._contexts.pop().__exit__(None, None, None)
            self._streaming.close(self._window)


class _Hook:
    """A hook that a deep copy of its module loses: the copy holds host parameters and streams nothing."""

    def __init__(self, call):
        self._call = call

    def __call__(self, *arguments: object) -> None:
        self._call(*arguments)

    def __deepcopy__(self, memo: dict) -> _Hook:
        return _Hook(_nothing)


def _nothing(*_: object) -> None:
    pass
