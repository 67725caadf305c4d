"""Explains the values of a run that were not given: those that an option brings for other keys, and those of `auto`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from training.config.adapter import has_adapter
from training.config.auto import AUTO
from training.config.modes import weights_node
from training.planning.speculation import speculation_line
from training.settle.components import DPO_REFERENCE, WEIGHTS, Components
from training.settle.gradients import KEY as GRADIENTS
from training.weights.model_tokenizer import KEY as TOKENIZER
from training.weights.model_tokenizer import own_tokenizer

MODELS = Path(__file__).resolve().parents[2] / "conf" / "model"


def chosen_values(components: Components, resident_key: str | None) -> dict[str, str]:
    """Returns a line for each choice, by key: the value and why. A key that the command line gives has no line.

    `resident_key` is that of the units that stay on the device, if their number was chosen.
    """
    config, choices = components.config, components.invocation.choices
    given = components.invocation.overridden
    lines = {}
    if "precision" in components.settled:
        device = "a GPU" if str(config.precision) == "bf16" else "no GPU that computes in bf16"
        lines["precision"] = f"{config.precision}, because there is {device}"
    if "microbatches" in components.settled:
        per_part = -(-components.task.units(config) // (config.microbatches * config.devices))
        lines["microbatches"] = f"{config.microbatches}, of {per_part:,} {components.task.unit}"
    if WEIGHTS in components.settled:
        begin = "the weights begin from the seed, because model.source names an architecture alone"
        lines[WEIGHTS] = begin if config.model.weights is None else f"{config.model.weights}, those of model.source"
    if TOKENIZER in components.settled:
        lines[TOKENIZER] = tokenizer_line(config)
    if DPO_REFERENCE in components.settled:
        begins = "an adapter that begins from nothing can be switched off"
        stays = "the weights of the reference train, so it is computed before the first step"
        lines[DPO_REFERENCE] = f"{config.task.reference}, because {begins if components.task.looks_ahead else stays}"
    if brought := brought_by_model(config, choices, given):
        lines[f"model={choices['model']}"] = "brings " + ", ".join(f"{key}={value}" for key, value in brought.items())
    if components.updates_overlap and components.footprint.units and "optimizer" not in given:
        lines["optimizer"] = f"{choices['optimizer']}, because offload={choices['offload']} keeps weights on the host"
    if (choice := components.gradients).why is not None:
        lines[GRADIENTS] = f"{'release' if choice.released else 'keep'}: {choice.why}"
    lines |= speculation_line(components)
    budget = config.vram_budget
    fills = "there is no vram_budget to fill" if budget is None else f"fills vram_budget={budget}"
    lines |= _beside_a_frozen_base(components)
    if resident_key is not None:
        units = OmegaConf.select(config, resident_key)
        lines[resident_key] = f"{units} of {units + components.footprint.units} units: {fills}"
    if config.optimizer.get("device_share") == AUTO and components.footprint.units:
        left = "what the first step leaves free" if budget is not None else "nothing"
        lines["optimizer.device_share"] = f"{left}: {fills}"
    return lines


def tokenizer_line(config: DictConfig) -> str:
    """Returns what dataset.tokenizer=auto stands for, and why."""
    value, own = config.dataset.tokenizer, own_tokenizer(config.model)
    if own is None:
        return "bytes, because the weights begin from the seed and model.source brings no tokenizer"
    return f"{value or 'bytes'}, the tokenizer of {own.of}"


def _beside_a_frozen_base(components: Components) -> dict[str, str]:
    """Returns the lines of what a run has because it trains an adapter."""
    config, choices, given = components.config, components.invocation.choices, components.invocation.overridden
    if not has_adapter(config):
        return {}
    lines, (key, weights) = {}, weights_node(config)
    adapter = f"adapter={choices['adapter']}"
    if weights.get("trained") == "device" and f"{key}.trained" not in given:
        lines[f"{key}.trained"] = f"device, because {adapter} is small: only frozen weights stream"
    if "optimizer" not in given and not components.updates_overlap:
        lines["optimizer"] = f"{choices['optimizer']}, because {adapter} trains on the device"
    return lines


def brought_by_model(config: DictConfig, choices: Mapping[str, str | None], given: set[str]) -> dict[str, Any]:
    """Returns the keys outside `model` that the file of the chosen model sets and that the run has from there."""
    path = MODELS / f"{choices['model']}.yaml"
    text = path.read_text() if path.is_file() else ""
    if not text.startswith("# @package _global_"):
        return {}
    content = yaml.safe_load(text)
    brought = dict(_options(content)) | dict(_values(content))
    return {
        key: value
        for key, value in brought.items()
        if key not in given and value in (choices.get(key), OmegaConf.select(config, key))
    }


def _options(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the groups of which the file chooses an option."""
    for entry in content.get("defaults", ()):
        for key, option in entry.items() if isinstance(entry, dict) else ():
            if key.startswith("override /"):
                yield key.removeprefix("override /"), option


def _values(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            if f"{prefix}{key}" != "model":
                yield from _values(value, f"{prefix}{key}.")
        elif key != "defaults":
            yield f"{prefix}{key}", value
