"""The machine that a plan is made for: a preset, one measured by scripts/probe.py, or this one measured in short.

The results of the probe are in $XDG_CACHE_HOME/lightering (else ~/.cache/lightering), one file for each
device name. Only `scripts/probe.py` writes there.
"""

import json
import math
import mmap
import os
import re
import statistics
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Self

import torch
from omegaconf import DictConfig, OmegaConf

from offload.knobs import GIB
from offload.planning import (
    Bandwidth,
    SimulatedStreams,
    StateFormat,
    measure_bandwidth,
    measure_update_rate,
    usable_cores,
)
from training.config.cards import PRESETS
from training.errors import UserError
from training.profiling.hardware import (
    datasheet_flops,
    describe_device,
    measured_bandwidth,
    peak_flops,
    seconds_of,
    vram_bytes,
)
from training.profiling.products import attention_flops_per_s, block_flops_per_s, block_work, grouped_flops_per_s
from training.runs.bounded_files import DamagedError, read_json
from training.runs.files import write_whole
from training.runs.records import is_number
from training.settle.components import Components, acquired
from training.weights.mapped import is_mapped, largest_file

# The share of the peak of matrix products that blocks reach with all their operations: 566 of 989 TFLOP/s on an H200.
ACHIEVED_SHARE = 0.57
# Of the rate of other products, that of attention over long rows: 478 of 650 TFLOP/s on an H200, 16k tokens.
ATTENTION_SHARE = 0.75
# Beyond so many tokens attention loses this share of its rate with each doubling, as keys and values leave the cache:
# 486, 459 to 480, 447 and 430 of 491 TFLOP/s over 2^17 to 2^20 tokens, on H200s that draw all the power they may.
ATTENTION_TOKENS, LOST_A_DOUBLING = 65_536, 0.025
# GB/s read and written by copies within a GPU, if nothing was measured.
DEVICE_GB_S = 1000.0
# Of that rate, what operations other than products and copies reach: six models on an H200 (docs/log.md).
OPERATIONS_SHARE = 0.62
# Reads of files: pieces at a time, by as many threads as a mode has, and the bytes that are read in all.
PIECE_BYTES = 8 * 2**20
THREADS = 4
MOST_BYTES = 512 * 2**20

# Updates share the host's memory with the copies of a step, which costs a tenth of their speed.
BESIDE_COPIES = 0.9
# Bytes of host memory that an update with float32 states moves for each parameter: `update_gparams_s` is its speed.
RATED_UPDATE_BYTES = 28
OTHER_PLACE = "set XDG_CACHE_HOME to a directory that can be written"

# Of the speed of copies in one direction, where as many go in the other.
BOTH_SHARE = 0.9

REQUIRED_KEYS = {"name", "host_gib", "h2d_gb_s", "d2h_gb_s", "both_gb_s", "update_gparams_s"}


@dataclass(frozen=True)
class Machine:
    """The sizes and speeds of a machine, and in `source` where they are from; None: not known, or not there.

    Copies between page-locked host memory and the device reach `h2d_gb_s` and `d2h_gb_s` alone, and `both_gb_s` each if
    both run at once; `device_gb_s` counts reads and writes of a copy within the device. A device receives `links_gb_s`
    from others of its host (None: as over the bus with both ways busy). `update_gparams_s` is the speed of host_adamw
    beside copies, with float32 states, `disk_gb_s` that of files of weights. The TFLOP/s are those of blocks; those of
    products of experts alone, in bf16, are `grouped_tflops` (None: as of other products), those of causal attention
    over rows of 16,384 tokens `attention_tflops` (None: `ATTENTION_SHARE` of other products). `attention_slowdown` is
    the time of attention over the rows of a run to that at this rate.
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
    grouped_tflops: float | None = None
    attention_tflops: float | None = None
    source: str = "preset"
    attention_slowdown: float = 1.0

    @property
    def bandwidth(self) -> Bandwidth:
        return Bandwidth(self.h2d_gb_s, self.d2h_gb_s, self.both_gb_s)

    @property
    def memory_gb_s(self) -> float:
        return OPERATIONS_SHARE * self.device_gb_s

    @property
    def rates(self) -> dict[str, float | dict[str, float]]:
        """The rates of the device as the cost model names them."""
        links_gb_s = self.both_gb_s if self.links_gb_s is None else self.links_gb_s
        costs = {} if self.vram_gib is None else {"attention": 1 / ATTENTION_SHARE}
        given = {"grouped": self.grouped_tflops, "attention": self.attention_tflops}
        for kind, tflops in given.items():
            if tflops is not None:
                costs[kind] = self.flops_per_s(torch.bfloat16) / tflops / 1e12
        if "attention" in costs:
            costs["attention"] *= self.attention_slowdown
        return {"memory_gb_s": self.memory_gb_s, "links_gb_s": links_gb_s, "costs": costs}

    def over_rows(self, tokens: int) -> Self:
        """Returns it for a run with rows of `tokens`."""
        doublings = max(math.log2(tokens / ATTENTION_TOKENS), 0.0)
        return replace(self, attention_slowdown=1 / (1 - LOST_A_DOUBLING * doublings))

    def speeds(self, dtype: torch.dtype) -> tuple[Bandwidth, float]:
        """Returns the speeds of a step in `dtype`: those of copies, and FLOP/s."""
        return self.bandwidth, self.flops_per_s(dtype)

    def simulated(self, dtype: torch.dtype) -> SimulatedStreams:
        """Returns streams that time a dry run in `dtype`."""
        return SimulatedStreams(torch.device("meta"), *self.speeds(dtype), **self.rates)

    def flops_per_s(self, dtype: torch.dtype) -> float:
        """Returns the rate of products in `dtype`, in FLOP/s: the block that was measured did more than products."""
        rate = (self.bf16_tflops if dtype == torch.bfloat16 else self.fp32_tflops) * 1e12
        work = block_work("cpu" if self.vram_gib is None else "cuda", dtype)
        seconds = work.flops / rate
        products_s, others = seconds - work.memory_bytes / self.memory_gb_s / 1e9, work.flops - work.attention_flops
        attention_s = 0.0 if self.attention_tflops is None else work.attention_flops / self.attention_tflops / 1e12
        if products_s - attention_s < seconds / 2:
            # Figures that were given contradict.
            return 2 * rate
        if attention_s:
            return others / (products_s - attention_s)
        share = 1.0 if self.vram_gib is None else ATTENTION_SHARE
        return (others + work.attention_flops / share) / products_s


def machine_of(components: Components) -> Machine:
    """Returns the machine that `hardware` asks for; `config.hardware` replaces its values.

    It is a preset, what the probe kept of the components' device, or measured in short. Raises UserError for
    hardware=measured if the probe kept nothing.
    """
    config, device, option = components.config, components.device, components.invocation.choices["hardware"]
    if option in PRESETS:
        return preset(option, _given(config))
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
    return _machine(found, _given(config))


def preset(option: str, given: Mapping[str, float] | None = None) -> Machine:
    """Returns the machine of an option of `hardware`, with the values in `given`; blocks reach 57% of data sheets."""
    figures, given = PRESETS[option], given or {}
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        peak = datasheet_flops(str(figures["name"]), dtype)
        figures = {f"{precision}_tflops": ACHIEVED_SHARE * peak / 1e12} | figures
    return _machine(figures, given)


def _machine(figures: Mapping[str, str | float], given: Mapping[str, float]) -> Machine:
    """Returns the machine of `figures` where `given` does not replace them, which its source then names."""
    changed = {"source": f"{figures['source']}; given: {', '.join(given)}"} if given else {}
    return Machine(**figures | given | changed)


def _given(config: DictConfig) -> dict[str, float]:
    """Returns the values of `config.hardware` under the names of `Machine`."""
    values = {key: value for key, value in OmegaConf.to_container(config.hardware).items() if value is not None}
    if (bus := values.pop("bus_gb_s", None)) is not None:
        values |= {"h2d_gb_s": bus, "d2h_gb_s": bus, "both_gb_s": BOTH_SHARE * bus}
    if (tflops := values.pop("tflops", None)) is not None:
        values |= {"bf16_tflops": tflops, "fp32_tflops": tflops, "grouped_tflops": None, "attention_tflops": None}
    return values


def measured_in_short(components: Components) -> dict[str, str | float]:
    """Measures bus, matrix products and host in a third of a second; returns them under the names of `Machine`."""
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
        values["device_gb_s"] = _device_gb_s(device)
        torch.cuda.empty_cache()
    return values | {"h2d_gb_s": bus.h2d, "d2h_gb_s": bus.d2h, "both_gb_s": bus.both}


def with_rate(machine: Machine, components: Components) -> Machine:
    """Returns `machine` with its rate in the precision of `components`: what is measured in short has one precision."""
    key = f"{components.config.precision}_tflops"
    if getattr(machine, key) is not None:
        return machine
    return replace(machine, **{key: peak_flops(components.device, components.dtype) * ACHIEVED_SHARE / 1e12})


def _host_copy_gb_s(nbytes: int = 2**25) -> float:
    """Returns the GB that a copy within host memory writes in a second: the best of sixteen or more, in 0.1 s."""
    source, target = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    seconds = []
    # Sixteen take 20 ms. Another program may be busy for as long.
    while len(seconds) < 16 or sum(seconds) < 0.1:
        seconds.append(seconds_of(partial(target.copy_, source), source.device))
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


def kept_path(device: torch.device) -> Path:
    """Returns the path of the file for `device`, which may not exist.

    Raises UserError if this user has no home directory and XDG_CACHE_HOME does not replace it.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise UserError(f"HOME is not set, and this user has no home directory: {OTHER_PLACE}") from None
    name = re.sub(r"[^A-Za-z0-9]+", "-", device_name(device)).strip("-").lower()
    return folder / "lightering" / f"probe-{name}.json"


def kept(device: torch.device) -> dict[str, str | float] | None:
    """Reads the values that were measured of `device`, under the names of `Machine`; None if there are none.

    A damaged file, or one with other content, counts as none.
    """
    try:
        values = read_json(kept_path(device))
    except (DamagedError, UserError):
        return None
    numbers = all(is_number(value) and 0 < value < math.inf for key, value in values.items() if key != "name")
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
        # torch has none for older GPUs.
        with suppress(RuntimeError):
            values["grouped_tflops"] = grouped_flops_per_s(device) / 1e12
        values["attention_tflops"] = attention_flops_per_s(device) / 1e12
    return {key: value if isinstance(value, str) else float(f"{value:.4g}") for key, value in values.items()}


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(describe_device(device)["cpu_name"])


def _device_gb_s(device: torch.device) -> float:
    """Returns the GB that a copy within the device reads and writes in a second."""
    # Several times what its caches hold.
    source = torch.zeros(GIB // 4, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [seconds_of(partial(target.copy_, source), device) for _ in range(6)]
    return 2 * source.nbytes / statistics.median(seconds) / 1e9
