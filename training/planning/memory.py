"""The bytes that a run is planned to hold, by part: on the device and on the host; and the update of the optimizer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from models.adapters import is_adapted
from models.loss import Head, tokens_per_chunk
from offload import HostAdamW, Speculation
from offload.knobs import GIB, parse_bytes
from offload.planning import DryRun, StateFormat, UpdateTimes, bytes_of_logs, log_bytes
from training.parallel.reduce import exchange_bytes
from training.parallel.world import ranks_of_host
from training.planning.dry_step import examples_of_microbatch, sample_bytes
from training.planning.machine import RATED_UPDATE_BYTES, Machine
from training.planning.report import RunPlan
from training.profiling.hardware import rss_gib
from training.settle.components import Components, trained_parameters

# Bytes of device memory that an update reads and writes for each parameter: of float32 ones, each operand once; of
# bfloat16 ones with moments in 8 bits, by torch's operations, through float32 scratch.
DEVICE_UPDATE_BYTES = {torch.float32: 28, torch.bfloat16: 50}
# The further operations of torch on a tile that join and split a compact master; counted and not measured.
DEVICE_REMAINDER_BYTES = 75
# The speed of a host's update with moments in 8 bits, beside copies, to that with float32 ones (two H200s, 2026-11-29:
# 4.3 and 6.4 billion parameters a second).
CODES_SPEED = 0.7
# The part of host memory with the logs for undoing updates.
UNDO_LOG = "rollback buffers"
# That of the averages of weights, with the weights themselves while the averages are in their place.
EMA = "ema"
# The bytes of an average, which an update reads and writes.
AVERAGE_BYTES = 4
# Host memory of a process that CUDA and its libraries take once they are in use (H100 and H200: 0.6 to 1.2 GiB).
CUDA_HOST_BYTES = int(0.8 * GIB)
# The parts of the host's memory that are page-locked.
PINNED = ("weights", "reference", "read ahead", "gradients", "activations")


@dataclass(frozen=True)
class PlannedUpdate:
    """The bytes of optimizer states on one device and on the host, and the parameters that are updated on each.

    `placed_gradient_bytes` are gradients of streamed units that stay on the device beside their states; as many bytes
    of new weights are copied out. `log_bytes` are the logs of all updates on the host, for undoing them.
    """

    device_bytes: int
    host_bytes: int
    placed_gradient_bytes: int
    host_parameters: int
    device_parameters: int
    log_bytes: int

    @classmethod
    def of(cls, components: Components, spare_bytes: float) -> PlannedUpdate:
        """Plans the update. `spare_bytes` of vram_budget are left for states if optimizer.device_share=auto."""
        config, plan, form = components.config, components.footprint, components.state_format
        resident_states = HostAdamW.planned_bytes(plan.resident, form)
        wanted = config.optimizer.get("device_share", 0)
        # Where ranks share states, each has its slices on its device; a checkpoint brings all to the host.
        ranks = ranks_of_host(config) if components.shares_homes else 1
        if wanted == "auto":
            room = components.room_for_states(spare_bytes - resident_states)
        else:
            room = parse_bytes("optimizer.device_share", wanted)
        sizes = [_count(unit) for unit in plan.trained]
        each = (HostAdamW.planned_bytes(unit, form, placed=True) // ranks for unit in plan.trained)
        totals = list(itertools.accumulate(each))
        placed = sum(total <= room for total in totals)
        on_device = sum(sizes[:placed])
        on_host = plan.trained[0 if components.shares_homes else placed :]
        # Of all units that are updated on the host; all sharers have as much.
        logs = [sum(map(bytes_of_logs, units[placed:])) for units in plan.slices]
        return cls(
            device_bytes=resident_states + (totals[placed - 1] if placed else 0),
            host_bytes=sum(HostAdamW.planned_bytes(unit, form) for unit in on_host),
            placed_gradient_bytes=sum(_bytes(unit) for unit in plan.trained[:placed]) // ranks,
            host_parameters=sum(sizes) - on_device,
            device_parameters=on_device // ranks + _count(plan.resident),
            log_bytes=len(logs) * max(logs) if logs else sum(map(log_bytes, plan.trained[placed:])),
        )

    def time(
        self, components: Components, machine: Machine, has_gpu: bool, speculative_share: float = 0.0
    ) -> UpdateTimes:
        """Returns how long the update takes on `machine`, and when it can begin, in a step that is not clipped.

        `speculative_share` of the host's begins inside backward before the norm is known.
        """
        # Every rank has its part of the host's cores and bandwidth, and updates its slices, or a copy of all.
        ranks = ranks_of_host(components.config)
        rate = machine.update_gparams_s * 1e9 / ranks * speed_of(components.state_format)
        host_parameters = self.host_parameters / (ranks if components.shares_homes else 1)
        streamed = [parameter for unit in components.footprint.trained for parameter in unit]
        resident = components.footprint.resident
        averaging_ms, after_ms = (_averaging_ms(some, components, machine) for some in (streamed, resident))
        if not has_gpu:
            updating_ms = (host_parameters + self.device_parameters) / rate * 1e3
            return UpdateTimes(host_ms=updating_ms + averaging_ms + after_ms)
        hides = components.updates_overlap and bool(components.footprint.units)
        early = components.updates_begin_early
        device_bytes = self.device_parameters * _device_update_bytes(components)
        host_ms, left_share = host_parameters / rate * 1e3 + averaging_ms, 1.0
        if after_ms:
            # The host waits for copies of what is on the device, and then averages it.
            after_ms += machine.bandwidth.two_way_ms(0, _bytes(resident))
        if components.gradients.released:
            # What may be left when backward ends.
            streamed = self.host_parameters * components.dtype.itemsize
            left_share = min(components.footprint.host_gradient_bytes / max(streamed, 1), 1.0)
        return UpdateTimes(
            host_ms=host_ms,
            device_ms=device_bytes / machine.device_gb_s / 1e6 + after_ms,
            begins="after" if not hides else "inside" if early or speculative_share else "at the end",
            inside_share=1.0 if early else speculative_share,
            left_ms=left_share * host_ms if left_share < 1 else math.inf,
        )

    def logs(self, host: Mapping[str, int], components: Components, machine: Machine) -> dict[str, int]:
        """Returns the bytes of the logs, a part of host memory: at most what the other parts, `host`, leave."""
        if not components.speculates:
            return {}
        limit = budgets_of(components.config, machine, has_gpu=False)["host_budget"]
        room = self.log_bytes if limit is None else max(limit - sum(host.values()), 0)
        return {UNDO_LOG: min(self.log_bytes, room)}

    def logged_share(self, host: Mapping[str, int]) -> float:
        """Returns the share of the host's updates, 0 to 1, for which the planned memory has a log."""
        return host.get(UNDO_LOG, 0) / self.log_bytes if self.log_bytes else 0.0


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
        config, footprint = components.config, components.footprint
        device = {
            "weights": footprint.resident_bytes,
            "slots": step.slot_bytes,
            **_if_any("reference", components.reference_device_bytes),
            "gradients": step.peak_gradient_bytes,
            "activations": step.activation_bytes,
            # Between steps, whose activations are gone by then.
            "samples": max(sample_bytes(components, has_gpu) - step.activation_bytes, 0),
        }
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
        streamed_bytes = footprint.host_home_bytes + footprint.ring_bytes + footprint.host_gradient_bytes
        host = {
            "weights": footprint.host_home_bytes,
            **_if_any("reference", components.reference_host_bytes),
            **_if_any("read ahead", footprint.ring_bytes),
            "gradients": footprint.host_gradient_bytes,
            "activations": max(step.host_bytes - streamed_bytes, 0),
            "optimizer": update.host_bytes,
            **_if_any(EMA, ema_bytes(components)),
            "process": int(rss_gib() * GIB) + (CUDA_HOST_BYTES if has_gpu else 0),
            **({} if has_gpu else {"device": sum(device.values())}),
        }
        host = bytes_of_ranks(host, components)
        host |= update.logs(host, components, machine)
        is_pinned = has_gpu and config.offload.get("pin", "auto") != "off"
        return cls(device, host, update, sum(host.get(part, 0) for part in PINNED) if is_pinned else 0)


def budgets_of(config: DictConfig, machine: Machine, has_gpu: bool) -> dict[str, int | None]:
    """Returns, by key, the bytes asked for, or all of the machine if these are fewer; None if neither is known."""
    return {
        "vram_budget": _least("vram_budget", config.vram_budget, machine.vram_gib) if has_gpu else None,
        "host_budget": _least("host_budget", config.host_budget, machine.host_gib),
    }


def planned_speculation(components: Components, plan: RunPlan) -> Speculation | None:
    """Returns what the mode is told of updates that may have to be undone; None where there are none.

    The ranks that share the homes have equal parts of the memory for logs, and all are told the same.
    """
    ranks = ranks_of_host(components.config) if components.shares_homes else 1
    undo_bytes = plan.host_bytes.get(UNDO_LOG, 0) // ranks
    return Speculation(components.largest_norm, undo_bytes) if components.speculates and undo_bytes else None


def logits_bytes(components: Components) -> int:
    """Returns the bytes of the logits that exist at once, in float32: as many tokens as the head computes at a time."""
    config = components.config
    heads = [module for module in components.model.modules() if isinstance(module, Head)]
    tokens = examples_of_microbatch(config) * config.seq_len // config.parallel.sequence
    return max((4 * tokens_per_chunk(tokens, head.out_features) * head.out_features for head in heads), default=0)


def ema_bytes(components: Components) -> int:
    """Returns the bytes of host memory that averages of the weights take; 0 where a run has none."""
    config, trained = components.config, trained_parameters(components.model)
    if config.ema is None:
        return 0
    swaps = config.eval.every is not None or config.sample.every is not None
    return AVERAGE_BYTES * _count(trained) + (_bytes(trained) if swaps else 0)


def checkpoint_bytes(components: Components) -> int:
    """Returns the bytes of a checkpoint: weights, or those of an adapter; states; averages. 0 if the run saves none."""
    if components.config.checkpoint.every is None and components.config.checkpoint.best is None:
        return 0
    model, trained = components.model, trained_parameters(components.model)
    # By their ids, so that a tied weight counts once.
    whole = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    weights = _bytes(trained if is_adapted(model) else whole.values())
    averages = 0 if components.config.ema is None else AVERAGE_BYTES * _count(trained)
    return weights + HostAdamW.planned_bytes(trained, components.state_format) + averages


def bytes_of_ranks(host: Mapping[str, int], components: Components) -> dict[str, int]:
    """Returns bytes of host memory by part for the ranks of one host; `host` has those of one rank."""
    ranks = ranks_of_host(components.config)
    # The first rank has the averages.
    counts = dict.fromkeys(host, ranks) | {EMA: 1}
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


def speed_of(form: StateFormat) -> float:
    """Returns the speed of the host's update relative to that with float32 masters and moments, bound by memory.

    Where the cores compute tables or random bits, they are the limit: random bits bring no gain, tables a loss.
    """
    computes = form.state_dtype == "int8" or form.master == "stochastic"
    speed = RATED_UPDATE_BYTES / (StateFormat() if computes else form).update_bytes
    return speed * (CODES_SPEED if form.state_dtype == "int8" else 1)


def _averaging_ms(weights: Sequence[Tensor], components: Components, machine: Machine) -> float:
    """Returns the time in which the host averages these weights, at the speed of its memory; 0 without averages."""
    if components.config.ema is None:
        return 0.0
    moved = _bytes(weights) + 2 * AVERAGE_BYTES * _count(weights)
    return moved / (machine.update_gparams_s * RATED_UPDATE_BYTES) / 1e6


def _if_any(part: str, nbytes: int) -> dict[str, int]:
    return {part: nbytes} if nbytes else {}


def _least(key: str, value: str | int | None, all_gib: float | None) -> int | None:
    asked = [] if value is None else [parse_bytes(key, value)]
    available = [] if all_gib is None else [int(all_gib * GIB)]
    return min(asked + available, default=None)


def _adds_first(components: Components) -> bool:
    """Tells whether each rank adds the gradients of several microbatches in memory of its own."""
    return components.config.microbatches > 1 and not components.footprint.layer_major


def _device_update_bytes(components: Components) -> float:
    """Returns the bytes of a device's memory that an update there moves for each parameter."""
    form, dtype = components.state_format, components.dtype
    in_bf16 = dtype == torch.bfloat16
    # Where Triton is missing, or fails its check, updates take longer.
    if in_bf16 and form.state_dtype != "int8":
        return form.update_bytes
    return DEVICE_UPDATE_BYTES[dtype] + (DEVICE_REMAINDER_BYTES if in_bf16 and form.master == "compact" else 0)


def _count(parameters: Sequence[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def _bytes(parameters: Sequence[Tensor]) -> int:
    return sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
