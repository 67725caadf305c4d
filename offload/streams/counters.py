"""The counters of a mode: bytes copied, times waited, parameters updated, and the host memory that it has."""

from __future__ import annotations

from dataclasses import dataclass, fields

# Amounts at this moment. The other counters only grow.
LEVELS = ("host_pinned_bytes", "host_pageable_bytes")


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Totals since the mode was attached, and the host memory at this moment.

    `weights + activations` are the counters of a mode made of both: all add up. `later - earlier` is what happened
    between two readings of one mode: totals are the growth, and the levels (`LEVELS`) are those of `later`, because a
    difference of two amounts is not an amount.

    Attributes:
        h2d_bytes, d2h_bytes: copied from host to device and back, activations included.
        activation_h2d_bytes, activation_d2h_bytes: of these, activations.
        stall_ms: compute stood still for copies; None where they are not timed, also in sums and differences.
        waited_for_bytes: copied while compute stood still, where each copy is waited for.
        swapped_bytes: activations that went to the host to free their memory.
        released_bytes: of these, those whose device memory was free until they were wanted back.
        update_ms: updates took on the host. `update_wait_ms`: the host waited for updates.
        updated_parameters: parameters that were updated on the host beside the device.
        speculated_parameters: of these, inside backward, before it was known whether the update had to be undone.
        undone_parameters: of these, those whose update was undone. `undo_ms`: that took on the host.
        file_bytes: read from files of weights. `file_wait_ms`: the host waited for these reads.
        host_pinned_bytes, host_pageable_bytes: host memory that the mode has now, page-locked and not; of page-locked
            memory that several processes share, this one's part.
    """

    h2d_bytes: float = 0
    d2h_bytes: float = 0
    activation_h2d_bytes: float = 0
    activation_d2h_bytes: float = 0
    stall_ms: float | None = 0.0
    waited_for_bytes: float = 0
    swapped_bytes: float = 0
    released_bytes: float = 0
    update_ms: float = 0.0
    update_wait_ms: float = 0.0
    updated_parameters: float = 0
    speculated_parameters: float = 0
    undone_parameters: float = 0
    undo_ms: float = 0.0
    file_bytes: float = 0
    file_wait_ms: float = 0.0
    host_pinned_bytes: int = 0
    host_pageable_bytes: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(**{name: _sum(one, two) for name, one, two in self._pairs(other)})

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            **{
                name: now if name in LEVELS else None if now is None or then is None else now - then
                for name, now, then in self._pairs(earlier)
            }
        )

    def _pairs(self, other: Counters) -> list[tuple[str, float | None, float | None]]:
        return [(entry.name, getattr(self, entry.name), getattr(other, entry.name)) for entry in fields(self)]


def _sum(one: float | None, two: float | None) -> float | None:
    return None if one is None or two is None else one + two
