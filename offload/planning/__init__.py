"""Predicts the bytes and the time of a step by running it on tensors without values.

The names in `__all__` are public, beside those of `offload`. Read `dry_run` first.

- `dry_run`, `dry_run_forwards`: a step, or forwards in a row, on the meta device; their result is a `DryRun`, each
  `Phase` of it with its `Work`. `left_as_found`: the model stays as it was. `fused_kernels`: attention and norms take
  the memory of a GPU's kernels. `MemoryTracker` counts bytes and FLOPs, `SimulatedStreams` keep the time, and
  `PlannedSharers` stand for processes that share homes. `LONG`: tokens whose masks and scores count apart.
  `NotFinalError`: released gradients that are not final. `without_compiler`: torch then does not import its compiler,
  which takes seconds, for what nobody compiles.
- `forecast`: the `Forecast` of a whole step, with the `UpdateTimes` of `update_work`; `hidden_share`, `floor_ms` and
  `bounded_by_files` are its parts. `GRADIENT_SLOTS`: units of gradients that may wait on the device.
- Of the machine: `Bandwidth`, `measure_bandwidth`, `measure_update_rate`, `free_host_bytes`, `usable_host_bytes`,
  `usable_cores`.
- Of the optimizer: `StateFormat`; `log_bytes`, `bytes_of_logs` and `can_be_undone` of
  updates that are undone.
"""

from offload.memory.limits import free_host_bytes, usable_cores, usable_host_bytes
from offload.optimizer.formats import StateFormat
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
from offload.planning.memory_tracker import LONG, MemoryTracker
from offload.planning.meta_kernels import fused_kernels
from offload.planning.simulated_streams import Bandwidth, PlannedSharers, SimulatedStreams, Work, measure_bandwidth
from offload.speculation.undo_log import bytes_of_logs, can_be_undone, log_bytes
from offload.torch_private.torch_internals import without_compiler
from offload.weights.gradients.final import NotFinalError
from offload.weights.streamer import GRADIENT_SLOTS

__all__ = [
    "GRADIENT_SLOTS",
    "LONG",
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
    "usable_cores",
    "usable_host_bytes",
    "without_compiler",
]
