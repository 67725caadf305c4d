"""Explains a GPU that runs out of memory in the middle of a run: the planned bytes, and three keys to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hydra.utils import get_class
from omegaconf import DictConfig

from offload.modes.none import Resident
from offload.modes.tensor_swap import TensorSwap
from offload.modes.weight_mode import WeightMode
from offload.runtime.byte_sizes import format_bytes
from training.components import Components, recomputes
from training.config.schema import Precision
from training.errors import UserError
from training.planning.report import RunPlan
from training.runs.failures import is_device_memory, requested


class DeviceMemoryError(UserError):
    """The GPU has too little memory for the run."""

    status = "out_of_memory"


@contextmanager
def device_memory_explained(components: Components, plan: RunPlan) -> Iterator[None]:
    """Around code that allocates on the device: an out-of-memory error becomes a DeviceMemoryError.

    Its message has the plan's numbers and three keys to change, first those that change the largest part.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_device_memory(error):
            raise
        advice = _listed(_advice(components, plan)[:3])
        raise DeviceMemoryError(
            f"the GPU is out of memory{requested(error)}: {_planned(plan)}: take {advice}"
        ) from error


def _planned(plan: RunPlan) -> str:
    budget = plan.budgets["vram_budget"]
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in plan.device_bytes.items() if nbytes)
    limit = f" of {format_bytes(budget)}" if budget is not None else ""
    return f"planned were {format_bytes(plan.totals['vram_budget'])}{limit} ({parts})"


def _advice(components: Components, plan: RunPlan) -> list[str]:
    """Returns overrides of the command line that save device memory, the most effective first."""
    activations = _fewer_activations(components)
    weights = _fewer_weights(components.config)
    first = plan.device_bytes["activations"] >= plan.totals["vram_budget"] / 2
    return [*activations, *weights] if first else [*weights[:2], *activations, *weights[2:]]


def _fewer_activations(components: Components) -> list[str]:
    config = components.config
    advice = []
    if config.microbatches < config.batch_size:
        advice.append(f"microbatches={min(2 * config.microbatches, config.batch_size)}")
    if not (recomputes(config) or components.mode.recomputes):
        advice.append("recompute=block")
    if config.batch_size > 1:
        advice.append(f"batch_size={config.batch_size // 2}")
    return [*advice, f"a seq_len below {config.seq_len}", "a smaller model"]


def _fewer_weights(config: DictConfig) -> list[str]:
    key, weights = _weights(config)
    advice = []
    if issubclass(get_class(weights._target_), Resident):
        swaps = issubclass(get_class(config.offload._target_), TensorSwap)
        advice.append("offload=layer_stream_swap" if swaps else "offload=layer_stream")
    elif issubclass(get_class(weights._target_), WeightMode):
        if str(weights.resident) != "0":
            advice.append(f"{key}.resident=0")
        if weights.slots > 1:
            advice.append(f"{key}.slots={weights.slots - 1}")
    if config.optimizer.get("device_share", 0) != 0:
        advice.append("optimizer.device_share=0")
    if config.precision == Precision.fp32:
        advice.append("precision=bf16")
    return advice


def _weights(config: DictConfig) -> tuple[str, DictConfig]:
    """Returns the key and the knobs of the mode that decides where the weights live."""
    key, mode = "offload", config.offload
    while "weights" in mode:
        key, mode = f"{key}.weights", mode.weights
    return key, mode


def _listed(advice: list[str]) -> str:
    *first, last = advice
    return f"{', '.join(first)} or {last}" if first else last
