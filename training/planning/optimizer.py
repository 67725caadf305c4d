"""The optimizer's part of a plan: where states live, what is updated where, and how long that takes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from torch import Tensor

from offload.optimizer.adamw import STATE_DTYPES, HostAdamW
from offload.planning.cost_model import UpdateTimes
from offload.runtime.byte_sizes import parse_bytes
from offload.weights.footprint import Footprint
from training.components import DTYPES, STATES_OF_SPARE, state_dtype, updates_early
from training.planning.machine import Figures

# torch's kernel, which `adamw` takes on the host, beside the one of host_adamw: 2.9 to 5.0 G parameters/s.
TORCH_KERNEL_SHARE = 0.58
# Bytes that an update passes through the device's memory for each parameter: as it is, and by float32 scratch.
DEVICE_UPDATE_BYTES = {torch.float32: 28, torch.bfloat16: 50}


@dataclass(frozen=True)
class PlannedUpdate:
    """Bytes of states by place, and the numbers of parameters by where they are updated.

    `device_bytes` and `host_bytes` are states. Of what is streamed, `placed_gradient_bytes` of gradients stay on the
    device with their states; new weights of as many bytes go home from there.
    """

    device_bytes: int
    host_bytes: int
    placed_gradient_bytes: int
    host_parameters: int
    device_parameters: int

    @classmethod
    def of(cls, config: DictConfig, plan: Footprint, spare_bytes: float) -> PlannedUpdate:
        """That of a mode with `plan`. `spare_bytes` of the device are left for states, all of which
        optimizer.device_share=auto may take."""
        # On the device each parameter has a master.
        states = 4 + 2 * STATE_DTYPES[state_dtype(config)].itemsize
        resident_states = HostAdamW.planned_bytes(plan.resident, state_dtype(config))
        wanted = config.optimizer.get("device_share", 0)
        room = (spare_bytes - resident_states) * STATES_OF_SPARE
        room = room if wanted == "auto" else parse_bytes("optimizer.device_share", wanted)
        sizes = [_count(unit) for unit in plan.trained]
        placed = sum(total * states <= room for total in itertools.accumulate(sizes))
        on_device = sum(sizes[:placed])
        return cls(
            device_bytes=resident_states + on_device * states,
            host_bytes=sum(HostAdamW.planned_bytes(unit, state_dtype(config)) for unit in plan.trained[placed:]),
            placed_gradient_bytes=on_device * DTYPES[config.precision].itemsize,
            host_parameters=sum(sizes) - on_device,
            device_parameters=on_device + _count(plan.resident),
        )

    def time(self, config: DictConfig, figures: Figures, has_gpu: bool, streams: bool) -> UpdateTimes:
        """How long it takes on the machine of `figures`; `streams`: the mode has units, and hides it."""
        hides = streams and "device_share" in config.optimizer
        rate = figures.update_gparams_s * 1e9 * (1 if "device_share" in config.optimizer else TORCH_KERNEL_SHARE)
        if not has_gpu:
            return UpdateTimes(host_ms=(self.host_parameters + self.device_parameters) / rate * 1e3)
        device_bytes = self.device_parameters * DEVICE_UPDATE_BYTES[DTYPES[config.precision]]
        return UpdateTimes(
            host_ms=self.host_parameters / rate * 1e3,
            device_ms=device_bytes / figures.device_gb_s / 1e6,
            begins="after" if not hides else "inside" if updates_early(config) else "at the end",
        )


def _count(parameters: Sequence[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
