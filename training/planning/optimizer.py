"""Plans the optimizer: where its states live, where parameters are updated, how long that takes, and what is undone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload import GIB, Footprint, HostAdamW, Speculation, parse_bytes
from offload.planning import StateFormat, UpdateTimes, bytes_of_logs, log_bytes
from training.parallel.world import ranks_of_host
from training.planning.machine import Machine
from training.planning.probe import RATED_UPDATE_BYTES
from training.planning.report import RunPlan
from training.settle.components import STATES_OF_SPARE, Components

# Bytes of device memory that an update reads and writes for each parameter: of float32 ones, each operand once; of
# bfloat16 ones with moments in 8 bits, by torch's operations, through float32 scratch.
DEVICE_UPDATE_BYTES = {torch.float32: 28, torch.bfloat16: 50}
# The further operations of torch on a tile that join and split a compact master; counted and not measured.
DEVICE_REMAINDER_BYTES = 75
# The name of the logs for undoing updates among the parts of host memory.
UNDO_LOG = "undo log"


@dataclass(frozen=True)
class PlannedUpdate:
    """The bytes of optimizer states on one device and on the host, and the parameters that are updated on each.

    `placed_gradient_bytes` are gradients of streamed units that stay on the device beside their states; as many bytes
    of new weights are copied out. `log_bytes` are the logs of all updates on the host, for undoing them.
    """

    device_bytes: int
    host_bytes: int
    placed_gradient_bytes: int
    host_parameters: int
    device_parameters: int
    log_bytes: int

    @classmethod
    def of(cls, components: Components, spare_bytes: float) -> PlannedUpdate:
        """Plans the update. `spare_bytes` of vram_budget are left for states if optimizer.device_share=auto."""
        config, plan, form = components.config, components.footprint, components.state_format
        resident_states = HostAdamW.planned_bytes(plan.resident, form)
        wanted = config.optimizer.get("device_share", 0)
        # Where ranks share states, each has its slices on its device; a checkpoint brings all to the host.
        ranks = ranks_of_host(config) if components.shares_homes else 1
        room = (spare_bytes - resident_states) * STATES_OF_SPARE
        room = room if wanted == "auto" else parse_bytes("optimizer.device_share", wanted)
        sizes = [_count(unit) for unit in plan.trained]
        each = (HostAdamW.planned_bytes(unit, form, placed=True) // ranks for unit in plan.trained)
        totals = list(itertools.accumulate(each))
        placed = sum(total <= room for total in totals)
        on_device = sum(sizes[:placed])
        return cls(
            device_bytes=resident_states + (totals[placed - 1] if placed else 0),
            host_bytes=sum(
                HostAdamW.planned_bytes(unit, form) for unit in plan.trained[0 if components.shares_homes else placed :]
            ),
            placed_gradient_bytes=on_device // ranks * components.dtype.itemsize,
            host_parameters=sum(sizes) - on_device,
            device_parameters=on_device // ranks + _count(plan.resident),
            log_bytes=_log_bytes(plan, placed),
        )

    def time(
        self, components: Components, machine: Machine, has_gpu: bool, speculative_share: float = 0.0
    ) -> UpdateTimes:
        """Returns how long the update takes on `machine`, and when it can begin, in a step that is not clipped.

        `speculative_share` of the host's begins inside backward before the norm is known.
        """
        hides = components.updates_overlap and bool(components.footprint.units)
        # Every rank has its part of the host's cores and bandwidth, and updates its slices, or a copy of all.
        ranks = ranks_of_host(components.config)
        rate = machine.update_gparams_s * 1e9 / ranks
        host_parameters = self.host_parameters / (ranks if components.shares_homes else 1)
        rate *= speed_of(components.state_format)
        if not has_gpu:
            return UpdateTimes(host_ms=(host_parameters + self.device_parameters) / rate * 1e3)
        early = components.updates_begin_early
        device_bytes = self.device_parameters * _device_update_bytes(components)
        host_ms, left_share = host_parameters / rate * 1e3, 1.0
        if components.gradients.released:
            # What may be left when backward ends.
            streamed = self.host_parameters * components.dtype.itemsize
            left_share = min(components.footprint.host_gradient_bytes / max(streamed, 1), 1.0)
        return UpdateTimes(
            host_ms=host_ms,
            device_ms=device_bytes / machine.device_gb_s / 1e6,
            begins="after" if not hides else "inside" if early or speculative_share else "at the end",
            inside_share=1.0 if early else speculative_share,
            left_ms=left_share * host_ms if left_share < 1 else math.inf,
        )


def speed_of(form: StateFormat) -> float:
    """Returns the speed of the host's update relative to that with float32 masters and moments, bound by memory.

    Where the cores compute tables or random bits, they are the limit, and no gain is assumed.
    """
    computes = form.state_dtype == "int8" or form.master == "stochastic"
    return RATED_UPDATE_BYTES / (StateFormat() if computes else form).update_bytes


def _device_update_bytes(components: Components) -> float:
    """Returns the bytes of a device's memory that an update there moves for each parameter."""
    form, dtype = components.state_format, components.dtype
    in_bf16 = dtype == torch.bfloat16
    # Where Triton is missing, or fails its check, updates take longer.
    if in_bf16 and form.state_dtype != "int8":
        return form.update_bytes
    return DEVICE_UPDATE_BYTES[dtype] + (DEVICE_REMAINDER_BYTES if in_bf16 and form.master == "compact" else 0)


def _log_bytes(plan: Footprint, placed: int) -> int:
    """Returns the bytes of the logs of updates of all units behind the first `placed`; all sharers have as much."""
    if not plan.slices:
        return sum(map(log_bytes, plan.trained[placed:]))
    return len(plan.slices) * max(sum(map(bytes_of_logs, units[placed:])) for units in plan.slices)


def _count(parameters: Sequence[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def with_log(
    host: Mapping[str, int], components: Components, update: PlannedUpdate, machine: Machine
) -> dict[str, int]:
    """Returns the bytes of host memory by part, with those of the logs: at most what the other parts leave."""
    if not components.speculates:
        return dict(host)
    asked = components.config.host_budget
    limits = [] if asked is None else [parse_bytes("host_budget", asked)]
    limits += [] if machine.host_gib is None else [int(machine.host_gib * GIB)]
    room = max(min(limits) - sum(host.values()), 0) if limits else update.log_bytes
    return {**host, UNDO_LOG: min(update.log_bytes, room)}


def log_share(host: Mapping[str, int], update: PlannedUpdate) -> float:
    """Returns the share of the host's updates, 0 to 1, for which the planned memory has a log."""
    return host.get(UNDO_LOG, 0) / update.log_bytes if update.log_bytes else 0.0


def planned_speculation(components: Components, plan: RunPlan) -> Speculation | None:
    """Returns what the mode is told of updates that may have to be undone; None where there are none.

    The ranks that share the homes have equal parts of the memory for logs, and all are told the same.
    """
    ranks = ranks_of_host(components.config) if components.shares_homes else 1
    undo_bytes = plan.host_bytes.get(UNDO_LOG, 0) // ranks
    return Speculation(components.largest_norm, undo_bytes) if components.speculates and undo_bytes else None
