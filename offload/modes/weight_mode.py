"""The base of the modes that stream weights: knobs, footprint, attach, step, detach. A mode adds where it cuts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from typing import Literal

from torch import Tensor, nn

from offload.files.file_filler import FileFiller, leave_in_files, ring_bytes
from offload.knobs import KnobError, knob
from offload.microbatches.layer_major import one_after_another
from offload.modes.mode import NO_OPTIONS, Attached, AttachOptions, Mode
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.overlap import Overlap
from offload.optimizer.states import shared_state_bytes
from offload.sharing.gather_filler import GatherFiller
from offload.sharing.slices import cut_for_sharers, slices_of, updated_elements
from offload.speculation.trials import Speculation
from offload.speculation.updates import overlapping
from offload.streams.registry import Streams
from offload.streams.transfer import Counters
from offload.torch_private.module_contexts import check_all_is_seen, check_recompute_is_outside
from offload.weights.footprint import Footprint
from offload.weights.gradients.final import why_kept
from offload.weights.gradients.seams import Updates
from offload.weights.prefetching.slot_contents import Filler
from offload.weights.streamer import WeightStreamer
from offload.weights.units.partition import (
    CutModel,
    CutPoint,
    check_amount,
    cut,
    keep_on_device,
    open_at_once,
)
from offload.weights.units.user_changes import counting_fused_updates


@dataclass(kw_only=True, eq=False)
class WeightMode(Mode, ABC):
    """Streams the units at the modules that `cut_points` names.

    Args:
        slots: units that fit on the device at a time, each in a buffer as large as the largest.
        prefetch: units fetched ahead of the one that computes: below slots; null is as many as the slots allow.
        resident: stays on the device after all, the first units and others spread evenly: a number of units (8), a
            share of the bytes (25%), or bytes (2GiB).
        include, exclude: patterns over the names of the modules that are cut out, such as model.layers.1*. A module
            streams where it matches an include pattern, or none is given, and no exclude pattern.
        trained: parameters that train stream with the rest, or stay on the device, as small ones beside frozen weights
            may; then nothing that streams has gradients.
        pin: auto page-locks the host memory, which copies five times as fast; "off" (quoted) takes pageable memory.
        source: weights that stream wait in host memory; or units that are frozen as a whole stay in their safetensors
            files (mapped), from which threads read them ahead of use, through the host memory of four units.
    """

    slots: int = knob(4, at_least=1)
    prefetch: int | None = knob(None, at_least=0)
    resident: str | int = knob(0)
    include: list[str] = knob([])
    exclude: list[str] = knob([])
    trained: Literal["stream", "device"] = knob("stream")
    pin: Literal["auto", "off"] = knob("auto")
    source: Literal["memory", "mapped"] = knob("memory")

    def check(self) -> None:
        if self.prefetch is not None and self.prefetch >= self.slots:
            problem = f"must be below slots={self.slots}, because the unit that computes needs a slot as well"
            raise KnobError("prefetch", self.prefetch, problem)
        check_amount(self.resident)

    @abstractmethod
    def cut_points(self, model: nn.Module) -> Iterable[CutPoint]:
        """Yields the modules at which the mode cuts `model`, none inside another."""

    def grouped(self, cut_points: Sequence[CutPoint]) -> Sequence[CutPoint]:
        """Returns the cut points under the names of their units; those of one name make one unit."""
        return cut_points

    def footprint(self, model: nn.Module, recompute: bool = False, options: AttachOptions = NO_OPTIONS) -> Footprint:
        streamed, sharers = self.cut_model(model, options), options.sharers.count
        ring = ring_bytes(streamed.units, options.spans) if self.source == "mapped" else 0
        rings = sharers if options.release_gradients else 0
        found = Footprint.of(streamed, self.slots_for(streamed), recompute, ring, rings)
        if any(unit.trained for unit in streamed.units):
            stay = why_kept(streamed.units, sharers)
        else:
            stay = "nothing that streams trains, so no gradients go to the host"
        found = replace(found, why_gradients_stay=stay)
        return replace(found, slices=updated_elements(streamed.units, sharers)) if sharers > 1 else found

    def attach(self, model: nn.Module, streams: Streams, options: AttachOptions = NO_OPTIONS) -> AttachedWeights:
        """Takes `model` over: its units go to host memory, the rest to the device of `streams`.

        Tensors on the meta device become memory where they belong, for the caller to fill there: until then, steps and
        forwards raise RuntimeError. Raises KnobError as `footprint` does, RuntimeError when a module of this model has
        a mode, MemoryError where the host has no room, OSError for a file of weights that cannot be read, and
        ValueError for a parameter that `sharers` cannot share. After an exception the model is as it was found.

        `sharers` share the homes of the units, and each has its own buffers, which stay on the device. In a step each
        copies in its slices of a unit and gathers the others' (`offload.sharing.gather_filler`). Outside of
        steps each copies whole units, so the caller first waits until the updates of all sharers are done, as before
        `detach`. Parameters are updated by an optimizer that was given to `overlap`.
        """
        return AttachedWeights(self, model, streams, options)

    def chosen(self, model: nn.Module) -> Sequence[CutPoint]:
        """Returns the cut points that `include` and `exclude` leave, named by their units."""
        return self.grouped([point for point in self.cut_points(model) if self._selects(point.name)])

    def cut_model(self, model: nn.Module, options: AttachOptions) -> CutModel:
        """Returns the units of `model`, and what stays on the device.

        Raises KnobError for a knob that does not fit, and ValueError as `check_all_is_seen` and `cut` do.
        """
        check_all_is_seen(model)
        chosen = self.chosen(model)
        if self.include and not chosen:
            names = ", ".join(point.name for point in islice(self.cut_points(model), 3))
            but = f" that exclude={self.exclude} leaves" if self.exclude else ""
            raise KnobError("include", self.include, f"leaves none of {names}, ... to stream: name some of these{but}")
        parts = cut(model, chosen, trained_stays=self.trained == "device")
        if self.trained == "device" and all(parameter.requires_grad for parameter in model.parameters()):
            problem = "nothing of the model is frozen, so nothing would stream: take stream"
            raise KnobError("trained", self.trained, problem)
        streamed = keep_on_device(parts, self.resident)
        if self.source == "mapped":
            if options.spans is None:
                problem = (
                    "it is not known where the weights are in files: give AttachOptions(spans=...), or take memory"
                )
                raise KnobError("source", self.source, problem)
            leave_in_files(streamed.units, options.spans)
        together = open_at_once(model, streamed.windows)
        if self.slots < len(together):
            names = " and ".join(unit.name for unit in together[:3])
            raise KnobError("slots", self.slots, f"must be at least {len(together)}, because {names} are used together")
        return cut_for_sharers(streamed) if options.sharers.count > 1 else streamed

    def slots_for(self, streamed: CutModel) -> int:
        """Returns the number of slots for this model."""
        # More than there are units would only take memory.
        return min(self.slots, max(len(streamed.units), 1))

    def _selects(self, name: str) -> bool:
        included = not self.include or any(fnmatchcase(name, pattern) for pattern in self.include)
        return included and not any(fnmatchcase(name, pattern) for pattern in self.exclude)


class AttachedWeights(Attached):
    """A model whose units stream."""

    def _take(self, mode: WeightMode, streams: Streams, options: AttachOptions) -> Collection[Tensor]:
        check_recompute_is_outside(self.model)
        streamed = mode.cut_model(self.model, options)
        sharers, make_filler = options.sharers, Filler
        self._sharers, self._releases = sharers, options.release_gradients
        if sharers.count > 1:
            form, trained = options.state_format, [t for unit in streamed.units for t in unit.trained]
            nbytes = sum(shared_state_bytes(form, t.dtype, t.shape) for t in trained) if form else 0
            make_filler = partial(GatherFiller, sharers=sharers, state_bytes=nbytes, releases=self._releases)
        elif mode.source == "mapped":
            make_filler = partial(FileFiller, spans=options.spans)
        if options.release_gradients and (reason := why_kept(streamed.units, sharers.count)):
            raise KnobError("gradients", "release", f"{reason}: take keep")
        slots = mode.slots_for(streamed)
        self._streamer = WeightStreamer(
            streamed,
            streams,
            slots=slots,
            prefetch=slots - 1 if mode.prefetch is None else min(mode.prefetch, slots - 1),
            pin=mode.pin == "auto",
            make_filler=make_filler,
            releases=options.release_gradients,
        )
        self._overlap: Overlap | None = None
        units = self._streamer.cut.units
        if sharers.count > 1:
            self.shared_parameters = frozenset(tensor.host for unit in units for tensor in unit.tensors)
        return {tensor.host for unit in units if unit.is_fixed for tensor in unit.tensors}

    def use_updates(self, updates: Updates) -> None:
        """Calls `updates` at the points of a step, in the place of those of `overlap`."""
        self._streamer.use_updates(updates)

    def accumulate(self, losses: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        with self._streamer.gradients.accumulating():
            return one_after_another(losses, self._streamer.gradients.last_microbatch)

    def gradient_norms(self) -> dict[nn.Parameter, Tensor]:
        return self._streamer.gradients.norms()

    def summed_parameters(self) -> frozenset[nn.Parameter]:
        return self._streamer.gradients.destination.summed_parameters()

    def overlap(
        self, optimizer: HostAdamW, early: bool, device_share: int = 0, speculation: Speculation | None = None
    ) -> None:
        """Hides the updates of `optimizer` behind the step; see `Attached.overlap`, `Overlap` and `overlapping`.

        Raises KnobError for what does not go together with released gradients. Where processes share the weights,
        `device_share` and `speculation` are for this process's slices, and all processes end a step alike, by
        `optimizer.step` with one scale or by `optimizer.skip`.
        """
        sharers = self._sharers
        if self._releases and not early:
            raise KnobError("early", early, "must be true where gradients are released to updates inside backward")
        if self._overlap is not None:
            self._overlap.close()
        if sharers.count > 1:
            slices = {
                tensor.host: slices_of(unit, sharers.count).elements(tensor, sharers.rank)
                for unit in self._streamer.cut.units
                for tensor in unit.trained
            }
            optimizer.states.share(slices, sharers, self._streamer.filler.take_states())
        self._overlap = overlapping(optimizer, self._streamer, early, device_share, speculation, sharers.count)
        self.use_updates(self._overlap)

    def place_states(self, nbytes: int) -> None:
        """Keeps optimizer states of the first units that fit into `nbytes` on the device from now on; between steps.

        Where processes share the weights, these are the states of this process's slices.
        """
        self._overlap.place_states(nbytes)

    @contextmanager
    def _around_step(self, norms: bool) -> Iterator[None]:
        with self._streamer.step(norms), counting_fused_updates():
            yield

    @contextmanager
    def _around_inference(self) -> Iterator[None]:
        with self._streamer.inference(), counting_fused_updates():
            yield

    def _give_back(self) -> None:
        try:
            self._streamer.detach()
        finally:
            self._streamer = self._overlap = None

    def _counters(self) -> Counters:
        return self._streamer.counters()
