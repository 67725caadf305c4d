"""How fast this machine is at what a step is made of: measured, and kept for every later plan.

What is kept lies in $XDG_CACHE_HOME/offload-training (else ~/.cache/offload-training), one file for each device's
name; `scripts/probe.py` alone writes there.
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
from offload.optimizer.kernels import SAMPLE, fastest_update, measure
from offload.planning.memory_tracker import MemoryTracker
from offload.planning.meta_kernels import fused_kernels
from offload.runtime import registry
from offload.runtime.bandwidth import measure_bandwidth
from offload.runtime.byte_sizes import GIB
from offload.runtime.host_cores import usable_cores
from training.profiling.hardware import describe_device

# Updates share the host's memory with the copies of a step, which takes a tenth of their speed.
BESIDE_COPIES = 0.9


def kept_path(device: torch.device) -> Path:
    """Where the figures of `device` are kept, whether they are there or not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^A-Za-z0-9]+", "-", device_name(device)).strip("-").lower()
    return cache / "offload-training" / f"probe-{name}.json"


def kept(device: torch.device) -> dict[str, str | float] | None:
    """The figures that were measured of `device`, under the keys of the group `hardware`; None: there are none.

    A file that is damaged, or holds something else, counts as none.
    """
    try:
        figures = json.loads(kept_path(device).read_text())
        return figures if isinstance(figures, dict) and figures.get("name") else None
    except (OSError, ValueError):
        return None


def keep(device: torch.device, figures: dict[str, str | float]) -> Path:
    """Writes the figures where `kept` finds them, and returns the path."""
    path = kept_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(figures, indent=2) + "\n")
    os.replace(partial, path)
    return path


def probe(device: torch.device) -> dict[str, str | float]:
    """Measures `device` and its host: under the keys of the group `hardware`. Half a minute at most.

    On the CPU, copies and products are small, and what a device has for itself is left out.
    """
    gpu = device.type == "cuda"
    streams = registry.acquire(device)
    bus = measure_bandwidth(streams, nbytes=(256 if gpu else 32) * 2**20)
    registry.release(streams)
    facts = describe_device(device)
    cores = usable_cores()
    (update_s,) = measure([fastest_update(max(cores - 1, 1))]).values()
    figures = {
        "name": device_name(device),
        "host_gib": facts["host_memory_gib"],
        "cores": cores,
        "h2d_gb_s": bus.h2d,
        "d2h_gb_s": bus.d2h,
        "both_gb_s": bus.both,
        "bf16_tflops": block_flops_per_s(device, torch.bfloat16) / 1e12,
        "fp32_tflops": block_flops_per_s(device, torch.float32) / 1e12,
        "update_gparams_s": SAMPLE / update_s / 1e9 * BESIDE_COPIES,
    }
    if gpu:
        figures |= {"vram_gib": facts["gpu_memory_gib"], "device_gb_s": _device_gb_s(device)}
    return {key: value if isinstance(value, str) else float(f"{value:.4g}") for key, value in figures.items()}


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(describe_device(device)["cpu_name"])


def block_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """The rate of forward and backward of Llama blocks, those of a 7B model on a GPU, in FLOP/s."""
    width, inner, heads, tokens = (4096, 11008, 32, 2048) if device.type == "cuda" else (512, 1376, 8, 256)
    shape = (2, tokens, width)
    flops = _counted_flops(Block(width, inner, heads, heads, 1e-5).to("meta", dtype), shape)
    block = Block(width, inner, heads, heads, 1e-5).to(device, dtype)
    seconds = [_seconds(block, torch.randn(shape, device=device, dtype=dtype, requires_grad=True)) for _ in range(8)]
    # The first ones load libraries and choose kernels.
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
    """Bytes read and written in a second, in GB, by copies on the device."""
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
