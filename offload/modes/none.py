"""none: everything stays on the device, the reference for numbers and for speed."""

from __future__ import annotations

from dataclasses import dataclass

from offload.modes.mode import Mode


@dataclass(kw_only=True, eq=False)
class Resident(Mode):
    """Parameters, gradients and buffers stay on the device; a step moves nothing."""
