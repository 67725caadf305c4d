"""Sums gradients that stay on the devices over sharers, bucket by bucket, while backward goes on.

PyTorch DDP does so (Li et al. 2020). Here the sharers tell each other which buckets are complete, with the fetches of
what streams: so all of them sum in one order, also where one lacks a gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from offload.sharing.links import Addends, Links
from offload.sharing.sharers import Sharers
from offload.sharing.slices import GradientBucket
from offload.sharing.sum_memory import SumRing
from offload.streams.registry import Event, Points, Streams
from offload.streams.transfer import PendingFree, Transfer, profiled
from offload.torch_private.torch_internals import gradient_accumulator
from offload.weights.gradients.offloader import is_sparse

# What may be summed at one exchange, of units and of buckets, and the number that stands for none.
SUMS_AT_ONCE = 4
NOTHING = -1
# Buckets that are complete before this process asks for an exchange for sums alone.
ASK_AFTER = SUMS_AT_ONCE


def offer(numbers: Sequence[int]) -> tuple[int, ...]:
    """Returns the first SUMS_AT_ONCE of `numbers`, with NOTHING in the place of those that are missing."""
    first = numbers[:SUMS_AT_ONCE]
    return (*first, *[NOTHING] * (SUMS_AT_ONCE - len(first)))


class _StepBucket:
    """A bucket in one step: how often its gradients have `landed` in the last microbatch, and where: `complete`."""

    def __init__(self, bucket: GradientBucket, number: int, streams: Streams):
        self.bucket = bucket
        self.complete = Points(streams)
        self.landed: Counter[nn.Parameter] = Counter()
        self._landed_once_before = False
        self._name = f"gradients of bucket {number} on the device"

    def __str__(self) -> str:
        return self._name

    @property
    def landed_once(self) -> bool:
        """True where each of the gradients has landed, and none of them again."""
        return len(self.landed) == len(self.bucket.parameters) == self.landed.total()

    @property
    def is_complete(self) -> bool:
        """True where no more is expected: the gradients have landed as they did in the step before."""
        return self._landed_once_before and self.landed_once

    def begin_step(self) -> None:
        self._landed_once_before = self.landed_once
        self.landed.clear()
        self.complete.clear()


class DeviceSums:
    """The gradients of this process that stay on the device, in `buckets`.

    A bucket is summed inside backward when all sharers have all of its gradients: when each has landed, if each landed
    once in the step before (reentrant checkpoints deliver some in pieces). What is not in `summed` afterwards is left
    to the caller. `agree` sums what all have: it is called where more is complete than an exchange carries.
    """

    def __init__(
        self,
        sharers: Sharers,
        links: Links,
        ring: SumRing,
        buckets: Sequence[GradientBucket],
        transfer: Transfer,
        agree: Callable[[], None],
    ):
        self.summed: set[nn.Parameter] = set()
        """what was summed in this step or the last"""
        self._agree = agree
        self._sharers = sharers
        self._links, self._ring = links, ring
        self._transfer = transfer
        self._streams = transfer.streams
        self._buckets = [_StepBucket(bucket, number, self._streams) for number, bucket in enumerate(buckets)]
        self._complete: list[int] = []
        self._complete_since_offer = 0
        # The last of those, while its point of compute is not recorded: a hook of its last gradient may follow.
        self._unrecorded: _StepBucket | None = None
        # Sums that wait for the end of backward, which may still read the memory of their gradients.
        self._unspread: list[tuple[_StepBucket, Tensor]] = []
        self._is_last_microbatch = False
        self._done: Event | None = None
        # Hooks of the parameters themselves would change the order of microbatches that a mode chooses. A parameter
        # does not keep its node alive.
        self._hooks = [
            (node := gradient_accumulator(parameter), node.register_hook(partial(self._land, number, parameter)))
            for number, bucket in enumerate(self._buckets)
            for parameter in bucket.bucket.parameters
        ]

    def begin_step(self) -> None:
        for bucket in self._buckets:
            bucket.begin_step()
        self._complete.clear()
        self._complete_since_offer = 0
        self._unrecorded = None
        self._unspread.clear()
        self.summed.clear()

    def last_microbatch(self) -> None:
        """Declares that the gradients which land from now on in this step are final."""
        self._is_last_microbatch = True

    def offers(self) -> tuple[int, ...]:
        """Returns the offer of the buckets that are complete, as `GradientSum.offers` does for units."""
        self._record_complete()
        self._complete_since_offer = 0
        return offer(self._complete)

    def sum_common(self, offers: Sequence[Sequence[int]]) -> bool:
        """Queues the sums of the buckets that all sharers have offered, in the order of the first; True if any."""
        common = [number for number in offers[0] if number != NOTHING and all(number in theirs for theirs in offers)]
        for number in common:
            self._complete.remove(number)
            self._sum(self._buckets[number])
        return bool(common)

    def end_step(self) -> None:
        """Ends the last microbatch, also after an error; compute waits for the sums."""
        self._is_last_microbatch = False
        if self._unspread:
            self._transfer.after_compute(self._streams.gather)
            with self._streams.on(self._streams.gather):
                for bucket, flat in self._unspread:
                    self._streams.writes(self._streams.gather, bucket, "sum")
                    bucket.bucket.spread(flat)
            self._done.record(self._streams.gather)
            self._unspread.clear()
        if self._done is not None:
            self._streams.compute.wait_event(self._done)
            self._done = None
            for bucket in self._buckets:
                self._streams.reads(self._streams.compute, bucket, "what follows the step")

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for _, hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _land(self, number: int, parameter: nn.Parameter, *_: tuple[Tensor | None, ...]) -> None:
        """Called when autograd has added to `parameter.grad`."""
        if not self._is_last_microbatch or parameter.grad is None or is_sparse(parameter.grad):
            return
        if parameter in self.summed:
            raise RuntimeError(
                f"a gradient of shape {tuple(parameter.shape)} on the device came after the last that was expected: the"
                " sharers have summed it. Reentrant checkpoints around layers that are used twice need"
                " use_reentrant=False"
            )
        self._record_complete()
        if self._complete_since_offer >= ASK_AFTER:
            self._agree()
        bucket = self._buckets[number]
        self._streams.writes(self._streams.compute, bucket, "backward")
        bucket.complete.note()
        bucket.landed[parameter] += 1
        if bucket.is_complete:
            self._complete.append(number)
            self._complete_since_offer += 1
            self._unrecorded = bucket
        elif number in self._complete:
            # It came a second time.
            self._complete.remove(number)

    def _record_complete(self) -> None:
        if self._unrecorded is not None:
            self._unrecorded.complete.record()
            self._unrecorded = None

    def _sum(self, bucket: _StepBucket) -> None:
        streams, gather, gradients, room = self._streams, self._streams.gather, bucket.bucket, None
        # Whether gradients share memory may differ from sharer to sharer. Their sizes do not: all have room, or none.
        if self._links.sums_own_memory and self._ring.has_room(gradients.nbytes):
            (room,) = self._ring.take([(gradients.dtype, gradients.length)], f"room for {bucket}")
        # Not for what compute was given since: the host may be far ahead of it.
        bucket.complete.hold_up(gather)
        streams.writes(gather, bucket, "sum")
        self._done = streams.event()
        try:
            self._add_up(bucket, room)
        finally:
            # Also where a sharer is lost: the end of the step, which waits for it, would hide that.
            self._done.record(gather)
        self.summed.update(gradients.parameters)

    def _add_up(self, bucket: _StepBucket, room: PendingFree | None) -> None:
        streams, gradients = self._streams, bucket.bucket
        with profiled(f"sum {bucket}"), streams.on(streams.gather), torch.no_grad():
            is_read = gradients.shares_memory()
            if room is None:
                flat = gradients.flat(streams.device, in_place=not is_read)
                self._sharers.sum(flat, f"the {bucket}")
                if not is_read:
                    gradients.spread(flat)
            else:
                streams.writes(streams.gather, room, "sum")
                room.done, flat = self._done, room.tensor
                addends = Addends(flat, *gradients.addends(flat))
                if is_read:
                    self._links.sum(addends, f"the {bucket}")
                    flat = flat.clone()
                else:
                    self._links.sum_in_place(addends, f"the {bucket}")
            if is_read:
                self._unspread.append((bucket, flat))
