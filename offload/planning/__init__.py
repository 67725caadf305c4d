"""Predicts the bytes and the time of a step by running it on tensors without values.

The names in `__all__` are public, beside those of `offload`. Read `dry_run` first, which runs a step, or forwards in a
row, on the meta device. `memory_tracker` counts bytes and FLOPs there, `simulated_streams` keep the time, and
`cost_model` makes the forecast of a whole step with its update. What a plan asks of the machine and of the optimizer is
named here too: speeds, free memory, formats of states, bytes of logs.
"""

from offload.memory.bandwidth import Bandwidth, measure_bandwidth
from offload.memory.limits import free_host_bytes, usable_host_bytes
from offload.optimizer.formats import MASTER_DTYPES, STATE_DTYPES, StateFormat
from offload.optimizer.kernel_choice import measure_update_rate
from offload.planning.cost_model import (
    Forecast,
    UpdateTimes,
    bounded_by_files,
    floor_ms,
    forecast,
    hidden_share,
    update_work,
)
from offload.planning.dry_run import DryRun, Phase, dry_run, dry_run_forwards, left_as_found
from offload.planning.memory_tracker import MemoryTracker
from offload.planning.meta_kernels import fused_kernels
from offload.planning.planned_sharers import PlannedSharers
from offload.planning.simulated_streams import SimulatedStreams, Work
from offload.speculation.undo_log import bytes_of_logs, can_be_undone, log_bytes
from offload.weights.gradients.final import NotFinalError
from offload.weights.streamer import GRADIENT_SLOTS

__all__ = [
    "GRADIENT_SLOTS",
    "MASTER_DTYPES",
    "STATE_DTYPES",
    "Bandwidth",
    "DryRun",
    "Forecast",
    "MemoryTracker",
    "NotFinalError",
    "Phase",
    "PlannedSharers",
    "SimulatedStreams",
    "StateFormat",
    "UpdateTimes",
    "Work",
    "bounded_by_files",
    "bytes_of_logs",
    "can_be_undone",
    "dry_run",
    "dry_run_forwards",
    "floor_ms",
    "forecast",
    "free_host_bytes",
    "fused_kernels",
    "hidden_share",
    "left_as_found",
    "log_bytes",
    "measure_bandwidth",
    "measure_update_rate",
    "update_work",
    "usable_host_bytes",
]
