"""Advice for a run that needs too much memory, or whose gradients are not finite: overrides that it can take.

Each saves memory by itself: the bytes of weights, gradients and states follow from the footprint of the changed
configuration, and those of activations are scaled, because a dry run of each change would take seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import DictConfig, OmegaConf

from offload import ActivationMode
from offload.planning import GRADIENT_SLOTS
from training.checkpoints.changes import MAY_CHANGE
from training.config.adapter import has_adapter
from training.config.modes import weights_node
from training.config.schema import SCHEMAS, Precision, Recompute
from training.config.validation import check
from training.errors import UserError
from training.planning.dry_step import examples_of_microbatch
from training.planning.memory import PlannedUpdate
from training.planning.report import RunPlan
from training.settle.components import Components, recomputes

MOST = 3
NOTHING_TO_CHANGE = "a smaller model"
# The share of all bytes that a change must save. Less is not worth a try, and within the error of the estimate.
LEAST_SHARE = 0.05
RESIDENT_SHARES = (0, "25%", "50%", "75%")
OTHER_MODES = ("layer_stream", "bounce_linear", "none")


@dataclass(frozen=True)
class Change:
    """A change of the configuration: overrides of the command line, by key, and the configuration with them.

    `same_numbers`: the run computes what it would have computed without, but for the order of sums.
    """

    overrides: Mapping[str, Any]
    config: DictConfig
    same_numbers: bool

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.overrides.items())


def memory_advice(components: Components, plan: RunPlan, budget: str, needed: int) -> str:
    """Returns overrides that lower what `budget` ("vram_budget" or "host_budget") limits, three at most, in words.

    First come those that save `needed` bytes, then those that leave the numbers of the run as they are, then those that
    save the most. One that would exceed the other budget is left out.
    """
    config = components.config
    if "gradients" in config.optimizer and not components.gradients.released:
        # No change but that of `gradients` itself releases them.
        config = copy.deepcopy(config)
        config.optimizer.gradients = "keep"
    # Made again: after a failure the model of `components` has memory.
    before = Components.of(config, components.invocation, components.device)
    found = []
    # Both runs are estimated alike, so that the error of the estimate does not look like a saving.
    now = _estimated(before, before, plan)
    for change in _changes(before, plan):
        after = _checked(before, change)
        if after is None or not _may_change(config, change):
            continue
        totals = _estimated(before, after, plan)
        saved = {key: now[key] - total for key, total in totals.items()}
        if saved[budget] <= LEAST_SHARE * plan.totals[budget] or _exceeds_another(plan, totals, budget):
            continue
        found.append((saved[budget] < needed, not change.same_numbers, -saved[budget], str(change)))
    return listed([words for *_, words in sorted(found)] or [NOTHING_TO_CHANGE])


def nonfinite_advice(config: DictConfig) -> str:
    """Returns overrides against gradients that are not finite, three at most, in words."""
    advice = {}
    if config.optimizer.lr > 0:
        advice["optimizer.lr"] = f"{config.optimizer.lr / 10:g}"
    if config.clip_norm is None:
        advice["clip_norm"] = 1
    warmup = min(config.steps // 10, 1000)
    if config.schedule.warmup < warmup:
        advice["schedule.warmup"] = warmup
    advice["on_nonfinite"] = "skip"
    changes = (Change({key: value}, config, False) for key, value in advice.items())
    return listed([str(change) for change in changes if _may_change(config, change)])


def listed(advice: list[str]) -> str:
    """Returns the first pieces of advice as words: "a, b or c"."""
    *first, last = advice[:MOST]
    return f"{', '.join(first)} or {last}" if first else last


def _changes(components: Components, plan: RunPlan) -> Iterator[Change]:
    """Yields changes that may save memory of either kind; whether they are valid and do is found out later."""
    config, footprint = components.config, components.footprint
    key, weights = weights_node(config)

    def change(name: str, value: Any, same_numbers: bool = True) -> Change:
        changed = copy.deepcopy(config)
        OmegaConf.update(changed, name, value)
        return Change({name: value}, changed, same_numbers)

    if not footprint.layer_major:
        yield change("microbatches", min(2 * config.microbatches, config.batch_size // config.devices))
    if not (recomputes(config) or components.mode.recomputes):
        yield _option(config, "recompute", "block", OmegaConf.structured(Recompute(blocks=True)))
    # Another mode would keep activations that this one computes again.
    others = () if components.mode.recomputes and not recomputes(config) else OTHER_MODES
    for name in others:
        node = _node_of("offload", name, weights)
        if node is not None and "trained" in node and "trained" not in weights:
            node.trained = "device" if has_adapter(config) else "stream"
        if node is not None and node._target_ != weights._target_ and not _lost(components, key, node):
            yield _option(config, key, name, node)
    if "slots" in weights:
        yield change(f"{key}.slots", footprint.slot_bytes // max(footprint.largest_unit_bytes, 1) - 1)
        for share in RESIDENT_SHARES:
            yield change(f"{key}.resident", share)
    if "outside" in weights:
        yield change(f"{key}.outside", "stream")
    if components.reference is not None:
        yield change("task.reference", "cached", same_numbers=config.adapter.get("weights") is None)
    if plan.kept_bytes:
        yield change("offload.budget", 0)
    if config.optimizer.get("gradients") == "keep":
        yield change("optimizer.gradients", "release")
    if "device_share" in config.optimizer:
        yield change("optimizer.device_share", 0)
        if plan.has_gpu and config.vram_budget is not None:
            yield change("optimizer.device_share", "auto")
        yield change("optimizer.state_dtype", "bf16", same_numbers=False)
    elif (host_adamw := _node_of("optimizer", "host_adamw", config.optimizer)) is not None:
        host_adamw.state_dtype = "bf16"
        switched = _option(config, "optimizer", "host_adamw", host_adamw)
        yield Change(switched.overrides | {"optimizer.state_dtype": "bf16"}, switched.config, same_numbers=False)
    yield change("precision", Precision.bf16, same_numbers=False)
    smaller = max(config.batch_size // 2, config.microbatches * config.devices)
    yield change("batch_size", min(smaller, config.batch_size - 1), same_numbers=False)
    if components.task.unit == "tokens":
        yield change("seq_len", config.seq_len // 2, same_numbers=False)


def _lost(components: Components, key: str, node: DictConfig) -> bool:
    """Tells whether the command line overrides a key under `key` that the option `node` lacks."""
    given = components.invocation.overridden
    return any(name.startswith(f"{key}.") and name.removeprefix(f"{key}.") not in node for name in given)


def _node_of(group: str, option: str, current: DictConfig) -> DictConfig | None:
    """Returns the keys of an option with the values of `current`; None if that would lose one that is no default."""
    node = OmegaConf.structured(SCHEMAS[group][option])
    defaults = OmegaConf.structured(OmegaConf.get_type(current))
    for name, value in current.items():
        if name.startswith("_"):
            continue
        if name in node and group == "optimizer":
            node[name] = value
        elif name == "trained":
            # Where the two modes put what trains is a property of what trains.
            if name in node:
                node[name] = value
        elif OmegaConf.is_missing(defaults, name) or value != defaults[name]:
            return None
    return node


def _option(config: DictConfig, key: str, option: str, node: DictConfig) -> Change:
    """Returns the change to the option `option` of the group at `key`, whose keys are in `node`."""
    changed = copy.deepcopy(config)
    OmegaConf.update(changed, key, node, merge=False)
    return Change({key if "." not in key else f"{key.partition('.')[0]}@{key}": option}, changed, same_numbers=True)


def _checked(before: Components, change: Change) -> Components | None:
    """Returns the components of the changed configuration; None if it is refused."""
    config = change.config
    try:
        check(config)
        model = before.model if config.precision == before.config.precision else None
        return Components.of(config, before.invocation, before.device, model=model)
    except (UserError, ValueError):
        return None


def _may_change(config: DictConfig, change: Change) -> bool:
    """Tells whether a run that resumes may take the change; a new run may take all."""
    if config.resume is None:
        return True
    names = [name.partition("@")[0] for name in change.overrides]
    return all(any(fnmatchcase(f"{name}{end}", may) for may in MAY_CHANGE for end in ("", ".")) for name in names)


def _exceeds_another(plan: RunPlan, totals: Mapping[str, int], budget: str) -> bool:
    return any(
        key != budget and limit is not None and limit < totals[key] > plan.totals[key]
        for key, limit in plan.budgets.items()
    )


def _estimated(before: Components, after: Components, plan: RunPlan) -> dict[str, int]:
    """Returns about the totals that a plan of `after` would have, from `plan`, that of `before`."""
    new, gradients = after.footprint, after.footprint.resident_gradient_bytes
    at_peak = min(plan.device_bytes["gradients"] / (before.footprint.resident_gradient_bytes or 1), 1.0)
    # With several microbatches, all gradients are there when the second one's activations are.
    at_peak = 1.0 if after.config.microbatches > 1 else at_peak
    # After backward, all gradients are there and no activations.
    moving = max(_activations(before, after, plan) + gradients * at_peak, gradients)
    device = new.resident_bytes + new.slot_bytes + after.reference_device_bytes + moving
    # Only a budget that was given is filled.
    vram = plan.budgets["vram_budget"] if plan.has_gpu and after.config.vram_budget is not None else 0
    update = PlannedUpdate.of(after, spare_bytes=vram - device)
    device += update.device_bytes
    if not after.updates_begin_early:
        device += update.placed_gradient_bytes
    host = (
        new.host_home_bytes + new.ring_bytes + new.host_gradient_bytes + update.host_bytes + plan.host_bytes["process"]
    )
    host += after.reference_host_bytes
    host += plan.host_bytes["activations"] * _share(before, after, at_once=not new.layer_major)
    if not plan.has_gpu:
        host += device
    return {"vram_budget": int(device), "host_budget": int(host)}


def _activations(before: Components, after: Components, plan: RunPlan) -> float:
    """Estimates the bytes of activations, and of copies under way, on the device."""
    moving = plan.device_bytes["activations"]
    kept = plan.kept_bytes if str(before.config.offload.get("budget")) == "auto" else 0
    copies = min(_copies_under_way(before), moving)
    logits = min(plan.logits_bytes, moving - copies)
    blocks = max(moving - copies - logits - kept, 0) * _share(before, after, at_once=True)
    if str(after.config.offload.get("budget")) == "auto":
        blocks += kept
    count = len(after.recomputed_blocks)
    if count and not before.recomputed_blocks:
        inputs = count * _tokens(after.config) * after.config.model.get("hidden_size", 0) * after.dtype.itemsize
        # Under a mode that moves activations, few of them are on the device at a time.
        blocks = blocks if isinstance(after.mode, ActivationMode) else min(blocks, blocks / count + inputs)
    return blocks + logits + _copies_under_way(after)


def _copies_under_way(components: Components) -> int:
    """Returns the bytes of gradients that are made or leave the device, and of earlier ones that they are added to."""
    again = components.config.microbatches > 1
    return (GRADIENT_SLOTS + 1 + again) * components.footprint.largest_unit_bytes


def _share(before: Components, after: Components, at_once: bool) -> float:
    """Returns how much of the activations is left: those of a microbatch, or else of all of a step."""
    was, now = ((_tokens(c.config) if at_once else c.config.batch_size * c.config.seq_len) for c in (before, after))
    return now * after.dtype.itemsize / (was * before.dtype.itemsize)


def _tokens(config: DictConfig) -> int:
    return examples_of_microbatch(config) * config.seq_len
