"""Predicts the bytes and the time of a step by running it on tensors without values.

The names in `__all__` are public, beside those of `offload`.

- `dry_run` runs a step on the meta device and returns a `DryRun` of `Phase`s; `SimulatedStreams` keep the time of its
  `Work`, and `PlannedSharers` stand for processes that share homes. It raises `NotFinalError` for a gradient that
  cannot be released. `dry_run_forwards` runs forwards in a row without gradients and returns a `ForwardRun`. Both leave
  the model as it was, as `left_as_found` does for other runs on the meta device.
- `MemoryTracker` counts bytes and FLOPs; `fused_kernels` are the kernels as a GPU has them.
- `forecast` makes a `Forecast` of a whole step, with the `UpdateTimes` of the optimizer; nothing is faster than
  `floor_ms`, and reads from files may make it longer (`bounded_by_files`); `hidden_share` tells how many copies of
  activations compute hides, and `update_work` when a step updates.
- `Bandwidth` and `measure_bandwidth` are of the bus, `measure_update_rate` is of the optimizer on the host, and
  `StateFormat` is how its states are held: one of `MASTER_DTYPES` and one of `STATE_DTYPES`. Updates of
  some formats `can_be_undone`, by logs of `log_bytes`, or `bytes_of_logs` where processes update slices.
  `usable_host_bytes` is the host memory that this process may use, `free_host_bytes` what is left of it, and
  `GRADIENT_SLOTS` the gradients that wait on the device for their copies.

Read `dry_run` first, then `memory_tracker` (bytes), `simulated_streams` (times) and `cost_model` (the whole step).
"""

from offload.memory.bandwidth import Bandwidth, measure_bandwidth
from offload.memory.host_bytes import free_host_bytes, usable_host_bytes
from offload.optimizer.formats import MASTER_DTYPES, STATE_DTYPES, StateFormat
from offload.optimizer.kernel_choice import measure_update_rate
from offload.optimizer.undo_log import bytes_of_logs, can_be_undone, log_bytes
from offload.planning.cost_model import (
    Forecast,
    UpdateTimes,
    bounded_by_files,
    floor_ms,
    forecast,
    hidden_share,
    update_work,
)
from offload.planning.dry_run import DryRun, ForwardRun, Phase, dry_run, dry_run_forwards, left_as_found
from offload.planning.memory_tracker import MemoryTracker
from offload.planning.meta_kernels import fused_kernels
from offload.planning.planned_sharers import PlannedSharers
from offload.planning.simulated_streams import SimulatedStreams, Work
from offload.weights.gradients.final import NotFinalError
from offload.weights.streamer import GRADIENT_SLOTS

__all__ = [
    "GRADIENT_SLOTS",
    "MASTER_DTYPES",
    "STATE_DTYPES",
    "Bandwidth",
    "DryRun",
    "Forecast",
    "ForwardRun",
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
