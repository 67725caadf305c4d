"""What a mode will hold and move, said before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.bandwidth import Bandwidth
from offload.unit import CutModel


@dataclass(frozen=True)
class Plan:
    """Bytes by place for one model under one mode. Traffic is that of a step with one microbatch.

    `layer_major`: all microbatches of a step share its traffic. Where activations are swapped, at most
    `activation_window_bytes` of them are on their way at a time, `activation_budget_bytes` stay on the device (None: as
    many as copies would not hide) and `activation_host_bytes` are on the host (None: as many as it has room for). How
    many there are, the first step shows: their traffic is not in the plan.
    """

    units: int
    largest_unit_bytes: int
    resident_bytes: int
    slot_bytes: int
    host_weight_bytes: int
    host_gradient_bytes: int
    h2d_bytes: int
    d2h_bytes: int
    layer_major: bool = False
    activation_window_bytes: int = 0
    activation_budget_bytes: int | None = 0
    activation_host_bytes: int | None = 0

    @classmethod
    def of(cls, model: CutModel, slots: int, recompute: bool) -> Plan:
        """The plan of a cut model that streams through `slots` device slots.

        Weights come in for forward and for backward, with recompute once more in between. What the slots still hold
        when forward turns to backward is not copied again; how much that is depends on the order of use, so the
        traffic in is an upper bound.
        """
        return cls(
            units=len(model.units),
            largest_unit_bytes=model.largest_unit_bytes,
            resident_bytes=model.resident_bytes,
            slot_bytes=slots * model.largest_unit_bytes,
            host_weight_bytes=model.unit_bytes,
            host_gradient_bytes=model.gradient_bytes,
            h2d_bytes=model.unit_bytes * (3 if recompute else 2),
            d2h_bytes=model.gradient_bytes,
        )

    def for_microbatches(self, count: int) -> Plan:
        """The plan with the traffic of a step of `count` microbatches.

        One after another, weights come in for each; gradients go out for each, and but for the first come back to be
        added to.
        """
        if self.layer_major:
            return self
        h2d_bytes = self.h2d_bytes * count + self.d2h_bytes * (count - 1)
        return replace(self, h2d_bytes=h2d_bytes, d2h_bytes=self.d2h_bytes * count)

    def floor_ms(self, bandwidth: Bandwidth, compute_ms: float = 0.0) -> tuple[float, str]:
        """No step is faster: the largest of its bytes in and out over the bandwidths, and of `compute_ms`.

        Returns the time in ms and what it is bound by: "copies in", "copies out" or "compute".
        """
        parts = {
            "compute": compute_ms,
            "copies in": self.h2d_bytes / bandwidth.h2d / 1e6,
            "copies out": self.d2h_bytes / bandwidth.d2h / 1e6,
        }
        bound = max(parts, key=parts.get)
        return parts[bound], bound

    def rows(self) -> list[tuple[str, str]]:
        """Label and value pairs for people."""
        rows = [
            ("units", f"{self.units} (largest {size(self.largest_unit_bytes)})"),
            ("resident weights on the device", size(self.resident_bytes)),
            ("device slots", size(self.slot_bytes)),
            ("weights on the host (page-locked for a GPU)", size(self.host_weight_bytes)),
            ("gradients on the host (likewise)", size(self.host_gradient_bytes)),
            ("copied in a step, at most", size(self.h2d_bytes)),
            ("copied out a step", size(self.d2h_bytes)),
        ]
        if not self.activation_window_bytes:
            return rows
        stay, host = self.activation_budget_bytes, self.activation_host_bytes
        return [
            *rows,
            ("activations on their way, on the device, at most", size(self.activation_window_bytes)),
            ("activations that stay there", "what copies would not hide" if stay is None else size(stay)),
            ("activations on the host, at most", "what is free" if host is None else size(host)),
        ]


def size(nbytes: int) -> str:
    """Bytes for people."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.2f} MiB"
