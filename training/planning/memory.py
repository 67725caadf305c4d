"""The bytes that a run is planned to hold, by part: on the device and on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig
from torch import nn

from models.loss import Head, tokens_per_chunk
from offload import GIB, parse_bytes
from offload.planning import DryRun
from training.parallel.reduce import exchange_bytes
from training.parallel.world import ranks_of_host
from training.planning.dry_step import examples_of_microbatch
from training.planning.forwards import sample_bytes
from training.planning.machine import Machine
from training.planning.optimizer import PlannedUpdate, with_log
from training.profiling.hardware import rss_gib
from training.settle.components import Components, trained_parameters


def budgets_of(config: DictConfig, machine: Machine, has_gpu: bool) -> dict[str, int | None]:
    """Returns, by key, the bytes asked for, or all of the machine if these are fewer; None if neither is known."""
    return {
        "vram_budget": _least("vram_budget", config.vram_budget, machine.vram_gib) if has_gpu else None,
        "host_budget": _least("host_budget", config.host_budget, machine.host_gib),
    }


# The parts of the host's memory that are page-locked.
PINNED = ("weights", "reference", "read ahead", "gradients", "activations")


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes by part, of one device and of all ranks of one host; `pinned_bytes` of the host are page-locked."""

    device: dict[str, int]
    host: dict[str, int]
    update: PlannedUpdate
    pinned_bytes: int

    @classmethod
    def of(cls, components: Components, machine: Machine, has_gpu: bool, step: DryRun) -> PlannedMemory:
        """Adds the optimizer, the samples and the ranks to the bytes of `step`."""
        config = components.config
        device = _of_the_step(components, has_gpu, step)
        # Without a budget that was asked for, a mode keeps nothing on the device that it would move.
        asked = has_gpu and config.vram_budget is not None
        fillable = budgets_of(config, machine, has_gpu)["vram_budget"] if asked else 0
        update = PlannedUpdate.of(components, spare_bytes=fillable - sum(device.values()))
        device["optimizer"] = update.device_bytes
        if config.devices > 1:
            # After backward, whose activations are gone by then.
            device["exchange"] = max(exchange_bytes(summed_after_backward(components)) - step.activation_bytes, 0)
        if not components.updates_begin_early:
            # Early updates free these while backward still frees activations, so they add nothing to the peak.
            device["gradients"] += update.placed_gradient_bytes
        host = _of_the_host(components, step, update) | ({} if has_gpu else {"device": sum(device.values())})
        host = with_log(bytes_of_ranks(host, components), components, update, machine)
        is_pinned = has_gpu and config.offload.get("pin", "auto") != "off"
        return cls(device, host, update, sum(host.get(part, 0) for part in PINNED) if is_pinned else 0)


def _of_the_step(components: Components, has_gpu: bool, step: DryRun) -> dict[str, int]:
    return {
        "weights": components.footprint.resident_bytes,
        "slots": step.slot_bytes,
        **_if_any("reference", components.reference_device_bytes),
        "gradients": step.peak_gradient_bytes,
        "activations": step.activation_bytes,
        # Between steps, whose activations are gone by then.
        "samples": max(sample_bytes(components, has_gpu) - step.activation_bytes, 0),
    }


def _of_the_host(components: Components, step: DryRun, update: PlannedUpdate) -> dict[str, int]:
    footprint = components.footprint
    streamed_bytes = footprint.host_home_bytes + footprint.ring_bytes + footprint.host_gradient_bytes
    return {
        "weights": footprint.host_home_bytes,
        **_if_any("reference", components.reference_host_bytes),
        **_if_any("read ahead", footprint.ring_bytes),
        "gradients": footprint.host_gradient_bytes,
        "activations": max(step.host_bytes - streamed_bytes, 0),
        "optimizer": update.host_bytes,
        "process": int(rss_gib() * GIB),
    }


def _if_any(part: str, nbytes: int) -> dict[str, int]:
    return {part: nbytes} if nbytes else {}


def logits_bytes(components: Components) -> int:
    """Returns the bytes of the logits that exist at once, in float32: as many tokens as the head computes at a time."""
    config = components.config
    heads = [module for module in components.model.modules() if isinstance(module, Head)]
    tokens = examples_of_microbatch(config) * config.seq_len
    return max((4 * tokens_per_chunk(tokens, head.out_features) * head.out_features for head in heads), default=0)


def _least(key: str, value: str | int | None, all_gib: float | None) -> int | None:
    asked = [] if value is None else [parse_bytes(key, value)]
    available = [] if all_gib is None else [int(all_gib * GIB)]
    return min(asked + available, default=None)


def bytes_of_ranks(host: Mapping[str, int], components: Components) -> dict[str, int]:
    """Returns bytes of host memory by part for the ranks of one host; `host` has those of one rank."""
    ranks = ranks_of_host(components.config)
    counts = dict.fromkeys(host, ranks)
    if components.shares_homes:
        # Gradients of several microbatches are added in memory of each rank, before the ranks sum them.
        own = host["gradients"] if _adds_first(components) else 0
        host = {**host, "activations": max(host["activations"] - own, 0)}
        counts |= {"weights": 1, "reference": 1, "optimizer": 1, "gradients": ranks + 1 if own else 1}
    return {name: nbytes * counts[name] for name, nbytes in host.items()}


def summed_after_backward(components: Components) -> Sequence[nn.Parameter]:
    """Returns the parameters whose gradients the ranks sum after backward, in the model's order."""
    everything = trained_parameters(components.model)
    if not components.shares_homes or _adds_first(components):
        return everything
    resident = set(components.footprint.resident)
    return [parameter for parameter in everything if parameter in resident]


def _adds_first(components: Components) -> bool:
    """Tells whether each rank adds the gradients of several microbatches in memory of its own."""
    return components.config.microbatches > 1 and not components.footprint.layer_major
