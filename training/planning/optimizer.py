"""Plans the optimizer: where its states live, where parameters are updated, and how long that takes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload import HostAdamW, parse_bytes
from offload.planning import STATE_DTYPES, UpdateTimes
from training.components import STATES_OF_SPARE, Components
from training.planning.machine import Machine

# The speed of torch's kernel, which `adamw` uses on the host, relative to host_adamw's: 2.9 to 5.0 G parameters/s.
TORCH_KERNEL_SHARE = 0.58
# Bytes of device memory that an update reads and writes for each parameter: in place, and through float32 scratch.
DEVICE_UPDATE_BYTES = {torch.float32: 28, torch.bfloat16: 50}


@dataclass(frozen=True)
class PlannedUpdate:
    """The bytes of optimizer states on device and host, and the number of parameters that are updated on each.

    `device_bytes` and `host_bytes` are states. `placed_gradient_bytes` are gradients of streamed units that stay on the
    device beside their states; as many bytes of new weights are copied out.
    """

    device_bytes: int
    host_bytes: int
    placed_gradient_bytes: int
    host_parameters: int
    device_parameters: int

    @classmethod
    def of(cls, components: Components, spare_bytes: float) -> PlannedUpdate:
        """Plans the update. `spare_bytes` of vram_budget are left for states if optimizer.device_share=auto."""
        config, plan, dtype = components.config, components.footprint, components.state_dtype
        # On the device each parameter has a master.
        states = 4 + 2 * STATE_DTYPES[dtype].itemsize
        resident_states = HostAdamW.planned_bytes(plan.resident, dtype)
        wanted = config.optimizer.get("device_share", 0)
        room = (spare_bytes - resident_states) * STATES_OF_SPARE
        room = room if wanted == "auto" else parse_bytes("optimizer.device_share", wanted)
        sizes = [_count(unit) for unit in plan.trained]
        placed = sum(total * states <= room for total in itertools.accumulate(sizes))
        on_device = sum(sizes[:placed])
        return cls(
            device_bytes=resident_states + on_device * states,
            host_bytes=sum(HostAdamW.planned_bytes(unit, dtype) for unit in plan.trained[placed:]),
            placed_gradient_bytes=on_device * components.dtype.itemsize,
            host_parameters=sum(sizes) - on_device,
            device_parameters=on_device + _count(plan.resident),
        )

    def time(self, components: Components, machine: Machine, has_gpu: bool) -> UpdateTimes:
        """Returns how long the update takes on `machine`, and when it can begin."""
        hides = components.updates_overlap and bool(components.footprint.units)
        # Every rank updates a copy of all parameters, with its part of the host's cores and bandwidth.
        rate = machine.update_gparams_s * 1e9 / components.config.devices
        rate *= 1 if components.updates_overlap else TORCH_KERNEL_SHARE
        if not has_gpu:
            return UpdateTimes(host_ms=(self.host_parameters + self.device_parameters) / rate * 1e3)
        device_bytes = self.device_parameters * DEVICE_UPDATE_BYTES[components.dtype]
        return UpdateTimes(
            host_ms=self.host_parameters / rate * 1e3,
            device_ms=device_bytes / machine.device_gb_s / 1e6,
            begins="after" if not hides else "inside" if components.updates_begin_early else "at the end",
        )


def _count(parameters: Sequence[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
