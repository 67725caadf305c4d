"""Chooses the device of a run, describes it, and reports its memory and its peak arithmetic rate."""

import functools
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil
import torch

from offload import Streams
from offload.knobs import GIB
from offload.planning import Bandwidth, measure_bandwidth, usable_cores, usable_host_bytes
from training.errors import UserError
from training.runs.files import HARDWARE_FILE, write_whole

SOURCE = Path(__file__).resolve().parents[2]
_bandwidths: dict[torch.device, Bandwidth] = {}

# Peak rates of dense products in TFLOP/s, from datasheets: (words, bfloat16 with fp32 accumulation, fp32 without TF32).
# The first row whose words all occur in the name that torch reports is used, so a variant stands before its family.
_DATASHEET_TFLOPS = (
    (("B200",), 2250.0, 75.0),
    (("H200", "NVL"), 835.5, 60.0),
    (("H200",), 989.4, 66.9),
    (("GH200",), 989.4, 66.9),
    (("H100", "PCIe"), 756.0, 51.2),
    (("H100", "NVL"), 835.5, 60.0),
    (("H100",), 989.4, 66.9),
    (("H800", "PCIe"), 756.0, 51.2),
    (("H800",), 989.4, 66.9),
    (("A100",), 312.0, 19.5),
    (("A800",), 312.0, 19.5),
    (("A40",), 149.7, 37.4),
    (("A30",), 165.0, 10.3),
    (("A10",), 125.0, 31.2),
    (("L40S",), 362.0, 91.6),
    (("L40",), 181.0, 90.5),
    (("L4",), 121.0, 30.3),
    (("6000", "Ada"), 364.2, 91.1),
    (("A6000",), 154.8, 38.7),
    (("5090",), 209.5, 104.8),
    (("4090",), 165.2, 82.6),
    (("4080", "SUPER"), 104.4, 52.2),
    (("4080",), 97.5, 48.7),
    (("3090", "Ti"), 80.0, 40.0),
    (("3090",), 71.0, 35.6),
)
# Words in the name of a GPU's slice (MIG) or of a slower variant, which do not reach the rates of the full card.
_PARTIAL_CARD_WORDS = {"MIG", "Laptop", "Max", "D"}


def resolve_device(name: str) -> torch.device:
    """Returns the torch device of `device=name`; auto: the first GPU, else the CPU. Raises UserError if missing."""
    if name == "cpu":
        return torch.device("cpu")
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not (match := re.fullmatch(r"cuda(?::(\d+))?", name)):
        raise UserError(f"device={name}: unknown device; choose auto, cuda, cuda:N (N counts from 0) or cpu")
    if torch.version.cuda is None and torch.version.hip is None:
        raise UserError(
            f"device={name}: this torch ({torch.__version__}) was built without CUDA; "
            "install a CUDA build of torch, or use device=cpu"
        )
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        cause = "does nvidia-smi list one?" if visible is None else f"CUDA_VISIBLE_DEVICES is '{visible}'"
        raise UserError(f"device={name}: torch finds no usable GPU ({cause}); repair that, or use device=cpu")
    index, count = int(match[1] or 0), torch.cuda.device_count()
    if index >= count:
        present = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
        raise UserError(f"device={name}: no such GPU; choose one of {present}")
    return torch.device("cuda", index)


def describe_device(device: torch.device) -> dict[str, str | int | float]:
    """Returns facts about device and machine that explain a measurement; of cores and memory what it may use."""
    facts: dict[str, str | int | float] = {
        "device": str(device),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_name": _cpu_name(),
        "cpu_cores": usable_cores(),
        "host_memory_gib": round((usable_host_bytes() or psutil.virtual_memory().total) / GIB, 1),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu_name"] = properties.name
        facts["gpu_memory_gib"] = round(properties.total_memory / GIB, 1)
        facts["cuda"] = torch.version.cuda or f"hip {torch.version.hip}"
        # By UUID: CUDA_VISIBLE_DEVICES changes the numbers that torch uses, but not those of nvidia-smi.
        facts.update(_nvidia_smi_facts(f"GPU-{properties.uuid}"))
    return facts


def measured_bandwidth(streams: Streams) -> Bandwidth:
    """Measures the bus once for each device of this process: copies of 64 MiB, 0.1 s on a GPU; in GB/s."""
    device = streams.device
    if device not in _bandwidths:
        _bandwidths[device] = measure_bandwidth(streams, nbytes=64 * 2**20, repeats=3)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return _bandwidths[device]


def record_hardware(streams: Streams, run_dir: Path) -> dict[str, str | int | float]:
    """Writes hardware.json: the facts of `describe_device`, the speed of a GPU's bus, and the `provenance`.

    The speeds are h2d_gb_s, d2h_gb_s and both_gb_s: GB/s of page-locked copies to the device alone, to the host alone,
    and each way while both run. Returns what it writes, without the provenance.
    """
    facts = describe_device(streams.device)
    if streams.asynchronous:
        speed = measured_bandwidth(streams)
        facts |= {"h2d_gb_s": speed.h2d, "d2h_gb_s": speed.d2h, "both_gb_s": speed.both}
    text = json.dumps(facts | provenance(), indent=2) + "\n"
    write_whole(run_dir / HARDWARE_FILE, text.encode())
    return facts


def provenance() -> dict[str, str]:
    """Returns the version of torch, the date and time with its zone, and the commit of the source, if that is known."""
    facts = {"torch": str(torch.__version__), "date": datetime.now().astimezone().isoformat(timespec="seconds")}
    return facts | ({"commit": known} if (known := commit(SOURCE)) else {})


@functools.cache
def commit(source: Path) -> str | None:
    """Returns the commit of a git checkout, with `-dirty` where its files differ; None if it is none."""
    # Without a .git of its own it may lie in the checkout of another project.
    if not (source / ".git").exists():
        return None
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the peak rate of dense products in FLOP/s: the datasheet's, else what a measurement of 0.12 s reaches."""
    known = known_peak_flops(device, dtype)
    return _measured_flops(device, dtype) if known is None else known


def known_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Returns the datasheet's peak rate in FLOP/s, the denominator of MFU; None on the CPU and for other GPUs."""
    return datasheet_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def rss_gib(sharers: int = 1) -> float:
    """Returns the resident host memory of this process in GiB; of memory that `sharers` processes share, its part."""
    shared = 0
    # Not all systems tell it; psutil's has libraries in it.
    with suppress(OSError, TypeError):
        if sharers > 1:
            status = Path("/proc/self/status").read_text()
            shared = int(re.search(r"^RssShmem:\s*(\d+)", status, re.MULTILINE)[1]) * 1024
    return (psutil.Process().memory_info().rss - shared + shared / sharers) / GIB


def vram_bytes(device: torch.device) -> int:
    """Returns the bytes of the GPU's memory; 0 on the CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def vram_peak_gib(device: torch.device) -> float:
    """Returns the peak GiB of live tensors on the GPU since the last `reset_peaks`; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0


def vram_reserved_gib(device: torch.device) -> float:
    """Returns the peak GiB that torch's allocator reserved on the GPU since the last `reset_peaks`; 0 on the CPU."""
    return torch.cuda.max_memory_reserved(device) / GIB if device.type == "cuda" else 0.0


def reset_peaks(device: torch.device) -> None:
    """Sets the GPU's memory peaks to the current values; does nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _cpu_name() -> str:
    # platform.processor() is empty on many Linux systems; on ARM /proc/cpuinfo has no model name either.
    with suppress(OSError):
        if named := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return named[1]
    return platform.processor() or platform.machine()


def _nvidia_smi_facts(gpu: str) -> dict[str, str | int]:
    if shutil.which("nvidia-smi") is None:
        return {}
    query = "driver_version,pcie.link.gen.max,pcie.link.width.max"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", f"--id={gpu}"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=2, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    fields = [field.strip() for field in output.strip().split(",")]
    if len(fields) != 3:
        return {}
    driver, generation, width = fields
    # A virtual GPU answers "[N/A]" for its link.
    link = {"pcie_generation": int(generation), "pcie_width": int(width)} if (generation + width).isdigit() else {}
    return {"driver": driver} | link


def datasheet_flops(gpu_name: str, dtype: torch.dtype) -> float | None:
    """Returns the peak rate in FLOP/s that the datasheet of a GPU states (float32: without TF32); None: not known."""
    if dtype not in (torch.bfloat16, torch.float32):
        return None
    words = set(re.split(r"[ -]", gpu_name))
    if words & _PARTIAL_CARD_WORDS:
        return None
    for required, bf16_tflops, fp32_tflops in _DATASHEET_TFLOPS:
        if words.issuperset(required):
            return (bf16_tflops if dtype == torch.bfloat16 else fp32_tflops) * 1e12
    return None


@torch.inference_mode()
def _measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    best, seconds, size = 0.0, 0.0, 128
    # Products of about ten milliseconds hide the cost of their launch, and there is time for several.
    while seconds < 0.01 and size < 8192:
        size *= 2
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        # The first one of a size may load the library and a kernel, which may take seconds.
        seconds = min(seconds_of(functools.partial(torch.mm, matrix, matrix), device) for _ in range(2))
        best = max(best, 2 * size**3 / seconds)
    deadline = time.perf_counter() + 0.1
    while time.perf_counter() < deadline:
        best = max(best, 2 * size**3 / seconds_of(functools.partial(torch.mm, matrix, matrix), device))
    del matrix
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return best


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds that a call takes, with the work on the device that it queues."""
    synchronize = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start
