"""Updates beside the step that begin before it is known whether they count (`trials`): `Overlap` with undo."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

from offload.knobs import KnobError
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.claims import Claim
from offload.optimizer.overlap import Overlap
from offload.speculation.trials import Attempt, Decision, Speculation, Trials
from offload.speculation.undo_log import can_be_undone, undo_library
from offload.streams.registry import Event, Signal
from offload.streams.transfer import Counters, PendingFree
from offload.weights.gradients.offloader import RingBlock
from offload.weights.streamer import WeightStreamer
from offload.weights.units.unit import OffloadUnit, UnitTensor


def overlapping(
    optimizer: HostAdamW,
    streamer: WeightStreamer,
    early: bool,
    device_share: int = 0,
    speculation: Speculation | None = None,
    processes: int = 1,
) -> Overlap:
    """Returns the updates of `optimizer` beside the step; see `Overlap`.

    With a `speculation` they may begin inside backward although not `early`, unless the optimizer has speculate=off or
    there is no C compiler. `processes` share the parameters. Raises KnobError for states that cannot be undone.
    """
    if early or speculation is None or optimizer.speculate == "off":
        return Overlap(optimizer, streamer, early, device_share)
    if not can_be_undone(optimizer.format):
        problem = (
            "updates of such states cannot be undone: give speculate=off, or master=compact and moments in fp32 or bf16"
        )
        raise KnobError("speculate", optimizer.speculate, problem)
    if (library := undo_library(optimizer.format)) is None:
        return Overlap(optimizer, streamer, early, device_share)
    trials = Trials(optimizer, library, speculation, processes)
    return SpeculativeOverlap(optimizer, streamer, trials, device_share)


class SpeculativeOverlap(Overlap):
    """Begins updates inside backward by gradients that may not count in full, and undoes them where they do not.

    All that is seen between backward and `step` is as if none had begun, but for parameters and states that are looked
    at without `state_dict` or `finish`. Units with states on the device wait for `step`.
    """

    def __init__(self, optimizer: HostAdamW, streamer: WeightStreamer, trials: Trials, device_share: int = 0):
        self._trials = trials
        # Those of this step, with the tensors that they are for.
        self._attempts: dict[OffloadUnit, list[tuple[Attempt, Sequence[UnitTensor]]]] = {}
        super().__init__(optimizer, streamer, early=True, device_share=device_share)

    def offer_all(self, scale: float) -> None:
        self._streamer.check_weights_may_change()
        # They are claimed anew, with the gradients and the settings of now.
        self._optimizer.release(self._tried(*self._attempts))
        super().offer_all(scale)
        self._trials.end_step(is_clipped=scale != 1.0)

    def skip(self) -> None:
        """Undoes the updates of this step that do not count for sure."""
        self.take_back()
        self._trials.end_step(is_clipped=True)

    def finish(self) -> None:
        """Waits for updates, too; between backward and `step` it undoes those that `step` then makes."""
        self.take_back()
        super().finish()

    def begin_step(self) -> None:
        """Undoes the updates of a step that nothing has ended, too: its gradients are added to."""
        self.take_back()
        self._trials.begin_step()
        super().begin_step()

    def before_onload(self, unit: OffloadUnit) -> None:
        if unit in self._attempts:
            self.take_back()
        super().before_onload(unit)

    def is_pending(self, unit: OffloadUnit) -> bool:
        return unit in self._attempts or super().is_pending(unit)

    def gradients_landed(
        self,
        unit: OffloadUnit,
        tensors: Sequence[UnitTensor],
        after: Sequence[Event],
        released: RingBlock | PendingFree | None = None,
    ) -> Signal | None:
        if isinstance(released, RingBlock):
            return super().gradients_landed(unit, tensors, after, released)
        unit.has_begun_updates = True
        if not self._trials.goes_on or self.keeps_gradients(unit):
            return None
        if claims := self._optimizer.claim([tensor.host for tensor in tensors]):
            attempt = Attempt(claims)
            self._attempts.setdefault(unit, []).append((attempt, tensors))
            self._queue(unit, tensors, after, partial(self._trials.make, attempt))
        return None

    def take_back(self) -> bool:
        """Undoes the updates of this step, and makes no more; those that count for sure stay."""
        if not self._attempts:
            return True
        units = list(self._attempts)
        self._trials.take_back()
        self._optimizer.release(self._tried(*units))
        for unit in units:
            self._settle(unit, Decision())
        for unit in units:
            self._worker.wait(unit)
        return True

    def abandon_step(self) -> None:
        """Takes back, too. Where that fails, the next wait for the worker raises the worker's error."""
        with suppress(Exception):
            self.take_back()

    def counters(self) -> Counters:
        return super().counters() + self._trials.counters()

    def close(self) -> None:
        """Undoes the updates on which `step` has not decided, too."""
        self.abandon_step()
        super().close()

    def _offer(
        self, unit: OffloadUnit, tensors: Sequence[UnitTensor], scale: float = 1.0, after: Sequence[Event] = ()
    ) -> None:
        if unit in self._attempts:
            claims = self._optimizer.claim([claim.parameter for claim in self._tried(unit)])
            self._settle(unit, Decision(scale, {claim.parameter: claim for claim in claims}))
        super()._offer(unit, tensors, scale, after)

    def _settle(self, unit: OffloadUnit, decision: Decision) -> None:
        attempts, tensors = zip(*self._attempts.pop(unit), strict=True)
        for attempt in attempts:
            self._trials.decide(attempt, decision)
        self._queue(unit, list(itertools.chain(*tensors)), (), partial(self._trials.settle, attempts))

    def _tried(self, *units: OffloadUnit) -> Iterator[Claim]:
        return (claim for unit in units for attempt, _ in self._attempts[unit] for claim in attempt.claims)
