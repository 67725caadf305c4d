"""Settles a configuration: chooses a value for each key that is `auto`, and says why it is this one.

Most follow from the configuration and the device, and are chosen here. `reasons_of` has those too that follow from the
model and its mode, and a plan chooses the number of units that stay on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from torch import nn

from offload import Footprint, Mode, find_blocks
from training.config.adapter import has_adapter
from training.config.construct import construct
from training.config.declare import AUTO, LONGEST
from training.config.modes import CONF
from training.config.rates import RECOMPUTE_FROM, Choice, shown, suit
from training.config.schema import OnNonfinite, Precision
from training.errors import UserError
from training.parallel.ranks import shares_homes
from training.parallel.world import row_shares
from training.runs.bounded_files import leaves_of
from training.runs.invocation import Invocation
from training.tasks.dpo import settled_reference
from training.tasks.task import Task
from training.weights.model_tokenizer import own_tokenizer, refuse_foreign_tokenizer, settled_tokenizer
from training.weights.source import weights_of_source


@dataclass(frozen=True)
class Settled:
    """A configuration with its choices. Whoever needs a value reads it in `config`.

    Attributes:
        device: where the run computes; a plan for another machine asks `Machine` instead.
        reasons: by key, a value that the command line did not give, and why it is this one.
        notes: how the run differs from what its configuration asked for.
    """

    config: DictConfig
    invocation: Invocation
    device: torch.device
    task: Task
    reasons: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def because(self, reasons: Mapping[str, str]) -> Settled:
        """Returns these choices with further `reasons`."""
        return replace(self, reasons={**self.reasons, **reasons})


def settle(config: DictConfig, invocation: Invocation, device: torch.device, on_gpu: bool | None = None) -> Settled:
    """Writes into `config` what is chosen in place of `auto`, and returns it with the reasons.

    `on_gpu`: whether a plan is for a GPU, if that differs from `device`. Raises UserError for a tokenizer that is not
    that of the weights, for a task that cannot be made, and for seq_len=max, which a plan replaces before.
    """
    if config.seq_len == LONGEST:
        raise UserError(f"seq_len={LONGEST}: is for a plan: add plan=true, and give the run the number that it names")
    reasons = {}

    def chosen(key: str) -> bool:
        return OmegaConf.select(config, key) == AUTO

    if chosen("task.reference"):
        config.task.reference = settled_reference(config)
        why = "an adapter that begins from nothing can be switched off"
        if config.task.reference == "cached":
            why = "the weights of the reference train, so it is computed before the first step"
        reasons["task.reference"] = f"{config.task.reference}, because {why}"
    task = construct(config.task, "task")
    if chosen("precision"):
        # Emulated, as on GPUs before Ampere, bfloat16 is slower than float32. A plan may be for a GPU that is not here.
        has_bf16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
        in_bf16 = has_bf16 and (device.type == "cuda" if on_gpu is None else on_gpu)
        config.precision = Precision.bf16 if in_bf16 else Precision.fp32
        has = "a GPU" if in_bf16 else "no GPU that computes in bf16"
        reasons["precision"] = Choice.of(config.precision, f"there is {has}", "GPU" if in_bf16 else "no GPU")
    if chosen("model.weights"):
        config.model.weights = found = weights_of_source(config.model)
        from_seed = Choice.of("the weights begin from the seed", "model.source names an architecture alone", "no files")
        reasons["model.weights"] = from_seed if found is None else f"{found}, those of model.source"
    if chosen("dataset.tokenizer"):
        config.dataset.tokenizer = settled_tokenizer(config)
        reasons["dataset.tokenizer"] = _why_tokenizer(config)
    else:
        refuse_foreign_tokenizer(config)
    if brought := brought_by_model(config, invocation):
        listed = ", ".join(f"{key}={value}" for key, value in brought.items())
        reasons[f"model={invocation.choices['model']}"] = f"brings {listed}"
    return Settled(config, invocation, device, task, reasons)


def settle_sizes(settled: Settled, model: nn.Module) -> Settled:
    """Writes into the configuration what follows from `model`, which is on the meta device, and returns the reasons."""
    config, task = settled.config, settled.task
    adapted = has_adapter(config)
    # A frozen one has an adapter's matrices beside it; those that modules_to_save trains are copies.
    counted = [each for each in model.parameters() if not (adapted and each.requires_grad)]
    parameters = sum(each.numel() for each in counted)
    reasons = suit(
        config, parameters, is_text=hasattr(model, "vocab_size"), positions=getattr(model, "most_positions", None)
    )
    if adapted and config.model.weights is None:
        why = "model.weights=null: give those of a trained model"
        reasons["adapter"] = Choice.of("trains beside random weights", why, "model.weights=null")
    if config.recompute.blocks is None:
        config.recompute.blocks = parameters >= RECOMPUTE_FROM and _has_blocks(model)
        if config.recompute.blocks:
            size = shown(parameters)
            reasons["recompute"] = Choice.of("block", f"the model has {size} parameters", size)
    if config.microbatches == AUTO:
        of_rank = -(-task.microbatches(config) // config.devices)
        config.microbatches = min(of_rank, config.batch_size // row_shares(config))
        each = units_of_microbatch(config, task)
        reasons["microbatches"] = f"{config.microbatches}, of {each:,} {task.unit}"
    return settled.because(reasons)


def units_of_microbatch(config: DictConfig, task: Task) -> int:
    """Returns the units of `task`, tokens or images, in a device's largest microbatch."""
    return -(-task.units(config) // (config.microbatches * config.devices))


def _has_blocks(model: nn.Module) -> bool:
    try:
        return bool(find_blocks(model))
    except ValueError:
        return False


def _why_tokenizer(config: DictConfig) -> str:
    own = own_tokenizer(config.model)
    if own is None:
        why = "the weights begin from the seed and model.source brings no tokenizer"
        return Choice.of("bytes", why, "model has none")
    return f"{config.dataset.tokenizer or 'bytes'}, the tokenizer of {own.of}"


def brought_by_model(config: DictConfig, invocation: Invocation) -> dict[str, Any]:
    """Returns the keys outside `model` that the file of the chosen model sets and that the run has from there."""
    choices = invocation.choices
    path = CONF / "model" / f"{choices.get('model')}.yaml"
    text = path.read_text() if path.is_file() else ""
    if not text.startswith("# @package _global_"):
        return {}
    content = yaml.safe_load(text)
    entries = [pair for entry in content.pop("defaults", ()) if isinstance(entry, dict) for pair in entry.items()]
    options = {key.removeprefix("override /"): name for key, name in entries if key.startswith("override /")}
    content.pop("model", None)
    return {
        key: value
        for key, value in (options | dict(leaves_of(content))).items()
        if key not in invocation.overridden and value in (choices.get(key), OmegaConf.select(config, key))
    }


@dataclass(frozen=True)
class GradientChoice:
    """`released`: each gradient goes to its update alone (`AttachOptions.release_gradients`).

    `why` that was chosen, in words; None where nobody had to choose: the user did, or no gradients go to the host.
    """

    released: bool = False
    why: str | None = None

    @classmethod
    def of(cls, config: DictConfig, mode: Mode, kept: Footprint) -> GradientChoice:
        """Chooses for the run that `config` describes. `kept` is the footprint of its mode with gradients kept.

        Raises UserError for optimizer.gradients=release where something besides the update needs them.
        """
        asked = config.optimizer.get("gradients", "keep")
        if asked == "keep" or (asked == AUTO and not kept.host_gradient_bytes):
            return cls()
        reason = _why_kept(config, mode, kept)
        if asked == AUTO:
            released = reason is None
            return cls(released, "updates begin inside backward, and nothing else needs them" if released else reason)
        if reason is not None:
            raise UserError(f"optimizer.gradients={asked}: {reason}; or take optimizer.gradients=keep")
        return cls(released=True)

    @property
    def reasons(self) -> dict[str, str]:
        """The reason of the choice by its key, where there was a choice."""
        return (
            {} if self.why is None else {"optimizer.gradients": f"{'release' if self.released else 'keep'}: {self.why}"}
        )

    def kept_because(self, why: str) -> GradientChoice:
        """Returns the choice to keep them after all. Raises UserError where the user asked for their release."""
        if self.released and self.why is None:
            raise UserError(f"optimizer.gradients=release: {why}: take optimizer.gradients=keep")
        return GradientChoice(released=False, why=why)


def _why_kept(config: DictConfig, mode: Mode, kept: Footprint) -> str | None:
    """Returns what needs the gradients besides their updates, and what to change; None if nothing does."""
    if kept.why_gradients_stay is not None:
        return kept.why_gradients_stay
    if config.devices > 1 and not shares_homes(config, mode):
        return f"devices={config.devices} sum them after backward: take devices=1"
    if config.clip_norm is not None:
        return (
            f"clip_norm={config.clip_norm:g} needs them until their norm is known: to release them take clip_norm=null"
        )
    if config.on_nonfinite != OnNonfinite.stop:
        return "on_nonfinite=skip needs to know first that all are finite: take on_nonfinite=stop"
    if config.microbatches > 1 and not kept.layer_major:
        return (
            f"those of microbatches={config.microbatches} are added up in host memory: take microbatches=1, or"
            " offload=shard_offload, which adds them up on the device"
        )
    return None


KEPT = GradientChoice()
