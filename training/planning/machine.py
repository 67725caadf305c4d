"""The figures of a machine that a plan is made for: of a preset, kept by the probe, or measured in short."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from time import perf_counter

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from offload.runtime import registry
from offload.runtime.bandwidth import Bandwidth
from offload.runtime.host_cores import usable_cores
from training.components import DTYPES
from training.errors import UserError
from training.planning.probe import device_name, kept, kept_path
from training.profiling.hardware import describe_device, measured_bandwidth, peak_flops, vram_bytes

# Of the peak of matrix products, what blocks reach with all else that they compute: 566 of 989 TFLOP/s on an H200.
ACHIEVED_SHARE = 0.57
# Bytes that an update passes through the host's memory for each parameter.
UPDATE_BYTES = 28
# Where nothing was measured: what GPUs copy on themselves, GB/s read and written; little of a step depends on it.
DEVICE_GB_S = 1000.0

NEEDED = {"name", "host_gib", "cores", "h2d_gb_s", "d2h_gb_s", "both_gb_s", "update_gparams_s"}


@dataclass(frozen=True)
class Figures:
    """What a machine has and does, and who says so. `vram_gib` is None without a GPU: the host is the device too.

    GB/s of page-locked copies each way alone, and of each of two at once; `device_gb_s` read and written on the device.
    `update_gparams_s`: by host_adamw on the host, beside copies. TFLOP/s are those of forward and backward of blocks;
    None: not known, and not asked for.
    """

    name: str
    host_gib: float
    cores: int
    h2d_gb_s: float
    d2h_gb_s: float
    both_gb_s: float
    update_gparams_s: float
    bf16_tflops: float | None = None
    fp32_tflops: float | None = None
    vram_gib: float | None = None
    device_gb_s: float = DEVICE_GB_S
    source: str = "preset"

    @property
    def bandwidth(self) -> Bandwidth:
        return Bandwidth(self.h2d_gb_s, self.d2h_gb_s, self.both_gb_s)

    def flops_per_s(self, dtype: torch.dtype) -> float:
        """The rate of a model's blocks in `dtype`, in FLOP/s."""
        return (self.bf16_tflops if dtype == torch.bfloat16 else self.fp32_tflops) * 1e12

    def as_dict(self) -> dict[str, str | float | None]:
        return asdict(self)


def is_whole(config: DictConfig) -> bool:
    """Whether `config.hardware` gives all that a plan needs, as presets do, so that nothing is measured."""
    return NEEDED | {f"{config.precision}_tflops"} <= _given(config).keys()


def figures_of(config: DictConfig, device: torch.device) -> Figures:
    """The figures that `config.hardware` asks for; what it gives itself goes before what is kept or measured.

    `device` is the one here, which is measured where figures are missing and nothing is kept of it. Raises UserError
    for hardware=measured where nothing is kept.
    """
    if is_whole(config):
        return Figures(**_given(config))
    found = _usable(kept(device))
    if found is None and HydraConfig.get().runtime.choices["hardware"] == "measured":
        raise UserError(
            f"hardware=measured: nothing is kept of {device_name(device)} in {kept_path(device)}: run"
            " python scripts/probe.py once, or take hardware=auto or a preset"
        )
    if found is None:
        found = measured_in_short(device, config.precision) | {"source": "measured in short"}
    else:
        found |= {"source": "kept by the probe"}
    return Figures(**found | _given(config))


def _usable(figures: dict | None) -> dict | None:
    """What the probe kept, unless that is of a version which measured something else."""
    known = {field.name for field in fields(Figures)}
    return figures if figures is not None and NEEDED <= figures.keys() <= known else None


def _given(config: DictConfig) -> dict[str, str | float]:
    values = OmegaConf.to_container(config.hardware)
    return {key: value for key, value in values.items() if value is not None}


def measured_in_short(device: torch.device, precision: str) -> dict[str, str | float]:
    """What a quarter of a second tells of `device`, as keys of `Figures`: its bus, the peak of products, the host."""
    host_gb_s = _host_copy_gb_s()
    # Copies to the CPU as a device are copies within its memory, and two at once share it.
    bus = Bandwidth(host_gb_s, host_gb_s, host_gb_s / 2)
    figures = {
        "name": device_name(device),
        "host_gib": describe_device(torch.device("cpu"))["host_memory_gib"],
        "cores": usable_cores(),
        "update_gparams_s": 2 * host_gb_s / UPDATE_BYTES,
        f"{precision}_tflops": peak_flops(device, DTYPES[precision]) * ACHIEVED_SHARE / 1e12,
    }
    if device.type == "cuda":
        figures["vram_gib"] = vram_bytes(device) / 2**30
        streams = registry.acquire(device)
        bus = measured_bandwidth(streams)
        registry.release(streams)
    return figures | {"h2d_gb_s": bus.h2d, "d2h_gb_s": bus.d2h, "both_gb_s": bus.both}


def _host_copy_gb_s(nbytes: int = 2**25) -> float:
    """Bytes that a copy within the host's memory writes in a second, in GB: the best of three."""
    source, target = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(3):
        start = perf_counter()
        target.copy_(source)
        seconds.append(perf_counter() - start)
    return nbytes / min(seconds) / 1e9
