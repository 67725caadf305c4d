"""Measures how fast this machine does the parts of a step, and keeps the result for later plans.

The results are in $XDG_CACHE_HOME/offload-training (else ~/.cache/offload-training), one file for each device name.
Only `scripts/probe.py` writes there.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from models.llama import Block, rotary_tables
from offload import GIB, usable_cores
from offload.planning import MemoryTracker, StateFormat, fused_kernels, measure_bandwidth, measure_update_rate
from training.errors import UserError
from training.profiling.hardware import describe_device
from training.runs.bounded_files import UnreadableError, read_json
from training.runs.files import write_whole
from training.runs.records import LARGEST, is_number
from training.settle.components import acquired

# Updates share the host's memory with the copies of a step, which costs a tenth of their speed.
BESIDE_COPIES = 0.9
# Bytes of host memory that an update with float32 states moves for each parameter: `update_gparams_s` is its speed.
RATED_UPDATE_BYTES = 28
OTHER_PLACE = "set XDG_CACHE_HOME to a directory that can be written"


def kept_path(device: torch.device) -> Path:
    """Returns the path of the file for `device`, which may not exist.

    Raises UserError if this user has no home directory and XDG_CACHE_HOME does not replace it.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise UserError(f"HOME is not set, and this user has no home directory: {OTHER_PLACE}") from None
    name = re.sub(r"[^A-Za-z0-9]+", "-", device_name(device)).strip("-").lower()
    return cache / "offload-training" / f"probe-{name}.json"


def kept(device: torch.device) -> dict[str, str | float] | None:
    """Reads the values that were measured of `device`, under the names of `Machine`; None if there are none.

    A damaged file, or one with other content, counts as none.
    """
    try:
        values = read_json(kept_path(device))
    except (UnreadableError, UserError):
        return None
    numbers = all(is_number(value) and 0 < value <= LARGEST for key, value in values.items() if key != "name")
    return values if numbers and isinstance(values.get("name"), str) and values["name"] else None


def keep(device: torch.device, values: dict[str, str | float]) -> Path:
    """Writes the values where `kept` finds them, and returns the path; raises UserError if that cannot be written."""
    path = kept_path(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(values, indent=2) + "\n").encode())
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}): {OTHER_PLACE}") from None
    return path


def probe(device: torch.device) -> dict[str, str | float]:
    """Measures `device` and its host in half a minute at most; returns the values under the names of `Machine`.

    On the CPU, copies and products are small, and the values of a device with its own memory are left out.
    """
    gpu = device.type == "cuda"
    with acquired(device) as streams:
        bus = measure_bandwidth(streams, nbytes=(256 if gpu else 32) * 2**20)
    facts = describe_device(device)
    cores = usable_cores()
    rated = measure_update_rate(max(cores - 1, 1)) * StateFormat().update_bytes / RATED_UPDATE_BYTES
    values = {
        "name": device_name(device),
        "host_gib": facts["host_memory_gib"],
        "h2d_gb_s": bus.h2d,
        "d2h_gb_s": bus.d2h,
        "both_gb_s": bus.both,
        "bf16_tflops": block_flops_per_s(device, torch.bfloat16) / 1e12,
        "fp32_tflops": block_flops_per_s(device, torch.float32) / 1e12,
        "update_gparams_s": rated / 1e9 * BESIDE_COPIES,
    }
    if gpu:
        values |= {"vram_gib": facts["gpu_memory_gib"], "device_gb_s": _device_gb_s(device)}
    return {key: value if isinstance(value, str) else float(f"{value:.4g}") for key, value in values.items()}


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(describe_device(device)["cpu_name"])


def block_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Measures forward and backward of a Llama block, on a GPU that of a 7B model; returns FLOP/s."""
    width, inner, heads, tokens = (4096, 11008, 32, 2048) if device.type == "cuda" else (512, 1376, 8, 256)
    shape = (2, tokens, width)
    flops = _counted_flops(Block(width, inner, heads, heads, 1e-5).to("meta", dtype), shape)
    block = Block(width, inner, heads, heads, 1e-5).to(device, dtype)
    seconds = [_seconds(block, torch.randn(shape, device=device, dtype=dtype, requires_grad=True)) for _ in range(8)]
    # The first three load libraries and choose kernels.
    return flops / statistics.median(seconds[3:])


def _forward_backward(block: Block, hidden: Tensor) -> None:
    cos, sin = rotary_tables(hidden.shape[1], block.self_attn.head_dim, 10000.0, hidden)
    block(hidden, cos, sin).backward(torch.ones_like(hidden))


def _counted_flops(block: Block, shape: tuple[int, ...]) -> float:
    tracker = MemoryTracker()
    hidden = torch.empty(shape, device="meta", dtype=next(block.parameters()).dtype, requires_grad=True)
    with fused_kernels(tracker.add_flops), tracker.recording():
        _forward_backward(block, hidden)
    return tracker.flops


def _seconds(block: Block, hidden: Tensor) -> float:
    _wait_for(hidden.device)
    start = perf_counter()
    _forward_backward(block, hidden)
    _wait_for(hidden.device)
    return perf_counter() - start


def _device_gb_s(device: torch.device) -> float:
    """Returns the GB that a copy within the device reads and writes in a second."""
    source = torch.zeros(GIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        _wait_for(device)
        start = perf_counter()
        target.copy_(source)
        _wait_for(device)
        seconds.append(perf_counter() - start)
    return 2 * source.nbytes / statistics.median(seconds) / 1e9


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
