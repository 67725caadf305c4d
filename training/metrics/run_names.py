"""The names, tags and group of a run in wandb, by which people tell runs apart."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from omegaconf import DictConfig

from training.runs.invocation import Invocation
from training.visible_text import shortened

# What the launcher of a sweep writes to the environment of a job: the group of its jobs, and what this one is called.
SWEEP_GROUP_VARIABLE, SWEEP_LABEL_VARIABLE = "OFFLOAD_SWEEP_GROUP", "OFFLOAD_SWEEP_LABEL"
# wandb takes 64 characters of a tag and 128 of a name, of which a seed has up to 20.
LONGEST_TAG, LONGEST_LABEL = 64, 100
# Overrides that a label leaves out: it has model and mode by themselves, and the others change no result.
UNNAMED = ("model", "model.source", "offload", "seed", "tracking", "resume", "force", "log_every")


def run_label(config: DictConfig, invocation: Invocation) -> str:
    """Returns the name of a run without its seed: in a sweep that of the job's row, else model, mode and overrides."""
    if label := os.environ.get(SWEEP_LABEL_VARIABLE):
        return shortened(label, LONGEST_LABEL)
    given = [
        override.lstrip("+~").removeprefix("offload.")
        for override in invocation.overrides
        if override.lstrip("+~").partition("=")[0] not in UNNAMED and not override.startswith("tracking.")
    ]
    return shortened(" ".join([model_name(config, invocation), invocation.choices["offload"], *given]), LONGEST_LABEL)


def run_name(config: DictConfig, invocation: Invocation) -> str:
    """Returns the name of a run in wandb: `tracking.name`, or label and seed, which in a sweep follow that name."""
    label, given = run_label(config, invocation), config.tracking.name
    if given is not None and SWEEP_LABEL_VARIABLE not in os.environ:
        return given
    return " ".join([*([given] if given else []), label, f"seed={config.seed}"])


def model_name(config: DictConfig, invocation: Invocation) -> str:
    """Returns the model's own name, as `Qwen3-8B` of `model.source=Qwen/Qwen3-8B`; without a source its option."""
    source = config.model.get("source")
    return Path(source).name.partition("@")[0] if source else invocation.choices["model"]


def chosen_options(choices: Mapping[str, str | None], groups: Iterable[str]) -> dict[str, str]:
    """Returns the chosen option of each group in `groups`, by the group's name.

    An option inside another one has the path of its key as its name, with underscores, such as `offload_weights`.
    """
    chosen = {}
    for group, option in choices.items():
        base, _, package = group.partition("@")
        if option is not None and (base in groups or base == "experiment"):
            chosen[(package or base).replace(".", "_")] = option
    return chosen


def run_tags(choices: Mapping[str, str]) -> list[str]:
    """Returns a tag `group=option` for each chosen option, as on the command line."""
    return [f"{group}={option}"[:LONGEST_TAG] for group, option in sorted(choices.items())]
