"""What a mode will hold and move, said before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from offload.bandwidth import Bandwidth
from offload.unit import CutModel


@dataclass(frozen=True)
class Plan:
    """Bytes by place for one model under one mode. Traffic is that of a step with one microbatch."""

    units: int
    largest_unit_bytes: int
    resident_bytes: int
    slot_bytes: int
    host_weight_bytes: int
    host_gradient_bytes: int
    h2d_bytes: int
    d2h_bytes: int

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
        return [
            ("units", f"{self.units} (largest {_size(self.largest_unit_bytes)})"),
            ("resident weights on the device", _size(self.resident_bytes)),
            ("device slots", _size(self.slot_bytes)),
            ("weights on the host (page-locked for a GPU)", _size(self.host_weight_bytes)),
            ("gradients on the host (likewise)", _size(self.host_gradient_bytes)),
            ("copied in a step, at most", _size(self.h2d_bytes)),
            ("copied out a step", _size(self.d2h_bytes)),
        ]


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.2f} MiB"
