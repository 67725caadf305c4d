"""A GPU that runs out of memory in the middle of a run: what was planned for it, and three things to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class
from omegaconf import DictConfig

from offload.modes.none import Resident
from offload.modes.weight_mode import WeightMode
from offload.runtime.byte_sizes import format_bytes
from training.components import recomputes
from training.config.schema import Precision
from training.errors import UserError
from training.planning.report import RunPlan
from training.runs.failures import is_device_memory, more_wanted


class DeviceMemoryError(UserError):
    """The GPU has no room for what the run asked for."""

    status = "out_of_memory"


@contextmanager
def device_memory_told(config: DictConfig, plan: RunPlan) -> Iterator[None]:
    """Around what allocates on the device: where memory does not suffice, DeviceMemoryError says so with the plan's
    numbers and three keys to change, those first that change the largest part."""
    try:
        yield
    except RuntimeError as error:
        if not is_device_memory(error):
            raise
        raise DeviceMemoryError(
            f"the GPU is out of memory{more_wanted(error)}: {_planned(plan)}: take {_listed(_advice(config, plan)[:3])}"
        ) from error


def _planned(plan: RunPlan) -> str:
    budget = plan.budgets["vram_budget"]
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in plan.device_bytes.items() if nbytes)
    there = f" of {format_bytes(budget)}" if budget is not None else ""
    return f"planned were {format_bytes(plan.totals['vram_budget'])}{there} ({parts})"


def _advice(config: DictConfig, plan: RunPlan) -> list[str]:
    """Overrides of the command line that save device memory, the most effective first."""
    activations = _fewer_activations(config)
    weights = _fewer_weights(config)
    first = plan.device_bytes["activations"] >= plan.totals["vram_budget"] / 2
    return [*activations, *weights] if first else [*weights[:2], *activations, *weights[2:]]


def _fewer_activations(config: DictConfig) -> list[str]:
    advice = []
    if config.microbatches < config.batch_size:
        advice.append(f"microbatches={min(2 * config.microbatches, config.batch_size)}")
    if not recomputes(config) and not _weights(config)[1].get("checkpoint", False):
        advice.append("recompute=block")
    if config.batch_size > 1:
        advice.append(f"batch_size={config.batch_size // 2}")
    return [*advice, f"a seq_len below {config.seq_len}", "a smaller model"]


def _fewer_weights(config: DictConfig) -> list[str]:
    key, mode = _weights(config)
    advice = []
    if issubclass(get_class(mode._target_), Resident):
        swaps = HydraConfig.get().runtime.choices["offload"] == "tensor_swap"
        advice.append("offload=layer_stream_swap" if swaps else "offload=layer_stream")
    elif issubclass(get_class(mode._target_), WeightMode):
        if str(mode.resident) != "0":
            advice.append(f"{key}.resident=0")
        if mode.slots > 1:
            advice.append(f"{key}.slots={mode.slots - 1}")
    if config.optimizer.get("device_share", 0) != 0:
        advice.append("optimizer.device_share=0")
    if config.precision == Precision.fp32:
        advice.append("precision=bf16")
    return advice


def _weights(config: DictConfig) -> tuple[str, DictConfig]:
    """The key and the knobs of the mode that says where the weights live."""
    key, mode = "offload", config.offload
    while "weights" in mode:
        key, mode = f"{key}.weights", mode.weights
    return key, mode


def _listed(advice: list[str]) -> str:
    *first, last = advice
    return f"{', '.join(first)} or {last}" if first else last
