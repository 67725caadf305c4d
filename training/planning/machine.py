"""The machine that a plan is made for: a preset, one measured by scripts/probe.py, or this one measured in short."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from time import perf_counter

import torch
from omegaconf import DictConfig, OmegaConf

from offload import GIB
from offload.planning import Bandwidth, SimulatedStreams
from training.errors import UserError
from training.planning.probe import RATED_UPDATE_BYTES, device_name, kept, kept_path
from training.profiling.hardware import describe_device, measured_bandwidth, peak_flops, vram_bytes
from training.settle.components import Components, acquired
from training.weights.mapped import is_mapped, largest_file

# The share of the peak of matrix products that blocks reach with all their operations: 566 of 989 TFLOP/s on an H200.
ACHIEVED_SHARE = 0.57
# GB/s read and written by copies within a GPU, if nothing was measured; little of a step depends on it.
DEVICE_GB_S = 1000.0
# Reads of files: pieces at a time, by as many threads as a mode has, and the bytes that are read in all.
PIECE_BYTES = 8 * 2**20
THREADS = 4
MOST_BYTES = 512 * 2**20

# Of the speed of copies in one direction, where as many go in the other.
BOTH_SHARE = 0.9

REQUIRED_KEYS = {"name", "host_gib", "h2d_gb_s", "d2h_gb_s", "both_gb_s", "update_gparams_s"}

# By the option of `hardware`. The H200, with 16 cores, was measured with this repository (docs/log.md) but for three
# estimates: fp32 is 57% of the data sheet's peak without TF32, copies on the device reach 4 of its 4.8 TB/s, and NVLink
# 80% of 450 GB/s each way. The others are from data sheets: 60% of dense peaks, what PCIe 4 x16 usually reaches, 85 and
# 90% of the memory's rate; hosts with 16 cores are assumed, and no NVLink.
PRESETS: dict[str, dict[str, str | float]] = {
    "h200": {
        "name": "H200", "vram_gib": 139, "host_gib": 125, "h2d_gb_s": 55.2, "d2h_gb_s": 55.0, "both_gb_s": 50.4,
        "bf16_tflops": 566, "fp32_tflops": 38, "update_gparams_s": 4.5, "device_gb_s": 4000, "links_gb_s": 360,
    },
    "a100": {
        "name": "A100 80GB", "vram_gib": 79, "host_gib": 128, "h2d_gb_s": 25, "d2h_gb_s": 25, "both_gb_s": 22,
        "bf16_tflops": 187, "fp32_tflops": 11.7, "update_gparams_s": 3.0, "device_gb_s": 1700,
    },
    "rtx4090": {
        "name": "RTX 4090", "vram_gib": 23.5, "host_gib": 64, "h2d_gb_s": 25, "d2h_gb_s": 25, "both_gb_s": 21,
        "bf16_tflops": 99, "fp32_tflops": 50, "update_gparams_s": 1.8, "device_gb_s": 900,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """The sizes and speeds of a machine, and in `source` where they are from; None: not known, or not there.

    Copies between page-locked host memory and the device reach `h2d_gb_s` and `d2h_gb_s` alone, and `both_gb_s` each if
    both run at once; `device_gb_s` counts reads and writes of a copy within the device. A device receives `links_gb_s`
    from others of its host (None: as over the bus with both ways busy). `update_gparams_s` is the speed of host_adamw
    beside copies, with float32 states, `disk_gb_s` that of files of weights. The TFLOP/s are those of blocks.
    """

    name: str
    host_gib: float
    h2d_gb_s: float
    d2h_gb_s: float
    both_gb_s: float
    update_gparams_s: float
    bf16_tflops: float | None = None
    fp32_tflops: float | None = None
    vram_gib: float | None = None
    device_gb_s: float = DEVICE_GB_S
    links_gb_s: float | None = None
    disk_gb_s: float | None = None
    source: str = "preset"

    @property
    def bandwidth(self) -> Bandwidth:
        return Bandwidth(self.h2d_gb_s, self.d2h_gb_s, self.both_gb_s)

    @property
    def rates(self) -> dict[str, float]:
        """The rates of the device as the cost model names them."""
        links_gb_s = self.both_gb_s if self.links_gb_s is None else self.links_gb_s
        return {"device_gb_s": self.device_gb_s, "links_gb_s": links_gb_s}

    def speeds(self, dtype: torch.dtype) -> tuple[Bandwidth, float]:
        """Returns the speeds of a step in `dtype`: those of copies, and FLOP/s."""
        return self.bandwidth, self.flops_per_s(dtype)

    def simulated(self, dtype: torch.dtype) -> SimulatedStreams:
        """Returns streams that time a dry run in `dtype`."""
        return SimulatedStreams(torch.device("meta"), *self.speeds(dtype), **self.rates)

    def flops_per_s(self, dtype: torch.dtype) -> float:
        """Returns the rate of a model's blocks in `dtype`, in FLOP/s."""
        return (self.bf16_tflops if dtype == torch.bfloat16 else self.fp32_tflops) * 1e12


def machine_of(components: Components) -> Machine:
    """Returns the machine that `hardware` asks for; `config.hardware` replaces its values.

    It is a preset, what the probe kept of the components' device, or measured in short. Raises UserError for
    hardware=measured if the probe kept nothing.
    """
    config, device, option = components.config, components.device, components.invocation.choices["hardware"]
    if option in PRESETS:
        return Machine(**PRESETS[option] | _given(config))
    found, known = kept(device), {field.name for field in fields(Machine)}
    if found is not None and not REQUIRED_KEYS <= found.keys() <= known:
        # Another version of the probe kept it.
        found = None
    if found is None and option == "measured":
        raise UserError(
            f"hardware=measured: nothing is kept of {device_name(device)} in {kept_path(device)}: run"
            " python scripts/probe.py once, or take hardware=auto or a preset"
        )
    found = measured_in_short(components) if found is None else found | {"source": "kept by the probe"}
    if is_mapped(config):
        # The disk is that of the files, and no property of the device.
        found |= {"disk_gb_s": disk_gb_s(largest_file(config, components.model))}
    return Machine(**found | _given(config))


def _given(config: DictConfig) -> dict[str, float]:
    """Returns the values of `config.hardware` under the names of `Machine`."""
    values = {key: value for key, value in OmegaConf.to_container(config.hardware).items() if value is not None}
    if (bus := values.pop("bus_gb_s", None)) is not None:
        values |= {"h2d_gb_s": bus, "d2h_gb_s": bus, "both_gb_s": BOTH_SHARE * bus}
    if (tflops := values.pop("tflops", None)) is not None:
        values |= {"bf16_tflops": tflops, "fp32_tflops": tflops}
    return values


def measured_in_short(components: Components) -> dict[str, str | float]:
    """Measures bus, matrix products and host in a quarter of a second; returns them under the names of `Machine`."""
    device, precision = components.device, components.config.precision
    host_gb_s = _host_copy_gb_s()
    # If the CPU is the device, copies to it stay within the host's memory, and two at once share its bandwidth.
    bus = Bandwidth(host_gb_s, host_gb_s, host_gb_s / 2)
    values = {
        "name": device_name(device),
        "source": "measured in short",
        "host_gib": describe_device(torch.device("cpu"))["host_memory_gib"],
        "update_gparams_s": 2 * host_gb_s / RATED_UPDATE_BYTES,
        f"{precision}_tflops": peak_flops(device, components.dtype) * ACHIEVED_SHARE / 1e12,
    }
    if device.type == "cuda":
        values["vram_gib"] = vram_bytes(device) / GIB
        with acquired(device) as streams:
            bus = measured_bandwidth(streams)
    return values | {"h2d_gb_s": bus.h2d, "d2h_gb_s": bus.d2h, "both_gb_s": bus.both}


def _host_copy_gb_s(nbytes: int = 2**25) -> float:
    """Returns the GB that a copy within host memory writes in a second: the best of sixteen of a millisecond."""
    source, target = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(16):
        start = perf_counter()
        target.copy_(source)
        seconds.append(perf_counter() - start)
    return nbytes / min(seconds) / 1e9


@cache
def disk_gb_s(path: Path) -> float | None:
    """Measures how fast the disk gives the file at `path`, in GB/s: up to 512 MiB of it, past the page cache.

    Returns None where the file is small or its file system does not read past the cache: then nothing is known.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (OSError, AttributeError):
        return None
    try:
        pieces = range(0, min(os.fstat(fd).st_size, MOST_BYTES) - PIECE_BYTES + 1, PIECE_BYTES)
        memory = [mmap.mmap(-1, PIECE_BYTES) for _ in range(THREADS)]
        start = perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            read = [pool.submit(_read, fd, memory[thread], pieces[thread::THREADS]) for thread in range(THREADS)]
            nbytes = sum(each.result() for each in read)
        seconds = perf_counter() - start
    except OSError:
        return None
    finally:
        os.close(fd)
    return nbytes / seconds / 1e9 if nbytes >= THREADS * PIECE_BYTES else None


def _read(fd: int, memory: mmap.mmap, offsets: range) -> int:
    return sum(os.preadv(fd, [memory], offset) for offset in offsets)
