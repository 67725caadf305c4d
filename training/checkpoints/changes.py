"""Compares a configuration with that of a checkpoint, and refuses changes with which a run cannot resume."""

import logging
import math
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from training.config.adapter import has_adapter
from training.errors import UserError
from training.runs.bounded_files import leaves_of, parse_yaml
from training.visible_text import shortened

logger = logging.getLogger(__name__)

# Keys that decide where a run computes, what it shows and when it ends, but not what it computes.
MAY_CHANGE = (
    "steps", "epochs", "warmup_steps", "log_every", "eval.every", "sample.*", "task.sample_*", "task.guidance",
    "offload.*", "recompute.*", "quantize.cache", "tracking.*", "checkpoint.*", "resume", "device", "devices",
    "parallel.*", "hardware*", "vram_budget", "host_budget", "plan", "force", "trace", "on_nonfinite",
    "optimizer.device_share", "optimizer.gradients", "optimizer.threads", "optimizer.speculate",
)  # fmt: skip
# These optimizers compute the same from the same states, so a run may resume with the other one.
SAME_OPTIMIZER = ("training.optim.AdamW", "offload.optimizer.adamw.HostAdamW")
ABSENT_KEYS = {"ema": "null", "optimizer.master": "compact", "optimizer.state_dtype": "fp32"}
ABSENT_KEYS |= {"dataset.overrides": "null", "parallel.sequence": "1", "recompute.tile": "null"}
ABSENT = "absent"


def config_text(config: DictConfig) -> str:
    """Returns the configuration as a checkpoint keeps it: YAML of plain values, interpolations resolved."""
    return OmegaConf.to_yaml(config, resolve=True)


def refuse_changes(config: DictConfig, saved: dict[str, Any], folder: Path, key: str) -> None:
    """Refuses to resume if `config` differs from the checkpoint's configuration in a key that must not change.

    `saved` is the configuration of the checkpoint in `folder`. Warns of changes that alter rounding. Raises
    UserError, whose message begins with `key`.
    """
    changed = changed_values(config, saved)
    # The files of a frozen base, and its tokenizer with them, may lie elsewhere now: base and batches are compared.
    may_change = (*MAY_CHANGE, "model.weights", "dataset.tokenizer") if has_adapter(config) else MAY_CHANGE
    if "devices" in changed:
        # A file that no run wrote may lack them; it is refused for its other keys.
        parts = [[str(each.get(name)) for name in ("devices", "microbatches")] for each in (saved, config)]
        was, now = ([int(part) if part.isdecimal() else 0 for part in each] for each in parts)
        as_many = math.prod(was) == math.prod(now) > 0
        if as_many:
            may_change = (*may_change, "microbatches")
        # Several devices with several microbatches add up those of each device first.
        if not (as_many and min(was) == min(now) == 1):
            logger.warning(
                "devices: was %s, is %s: the gradients of a step are added in other parts or in another order than"
                " before, so the rest of the run differs in rounding from what it would have been; one device with N"
                " microbatches and N devices with one each differ in nothing",
                *changed["devices"],
            )
    if "parallel.sequence" in changed:
        logger.warning(
            "parallel.sequence: was %s, is %s: losses and gradients are sums of other parts than before, so the rest of"
            " the run differs in rounding from what it would have been",
            *changed["parallel.sequence"],
        )
    if "recompute.tile" in changed:
        logger.warning(
            "recompute.tile: was %s, is %s: gradients of weights are sums over other tiles than before, and dropout"
            " inside an MLP draws other masks, so the rest of the run differs from what it would have been",
            *changed["recompute.tile"],
        )
    refused = [name for name in changed if not any(fnmatchcase(name, pattern) for pattern in may_change)]
    if refused:
        if "model._target_" in refused:
            # A model of another class has other keys, which say no more.
            refused = ["model._target_"]
        listed = "; ".join(f"{name}: was {changed[name][0]}, is {changed[name][1]}" for name in refused)
        # The weights may not fit into another model.
        is_other_model = any(
            name.startswith(("model.", "adapter.")) and not name.endswith(".weights") for name in refused
        )
        or_anew = "" if is_other_model else f", or begin a new run from these weights, {weights_key(saved)}={folder}"
        raise UserError(
            f"{key}: the configuration is not the checkpoint's in {listed}: give the old values to resume{or_anew}"
        )


def warn_of_steps(config: DictConfig, saved: dict[str, Any]) -> None:
    """Warns if the learning rate falls over other steps than in `saved`. Epochs are steps in both configurations."""
    if OmegaConf.select(config, "schedule.final") is not None and not _same(was := saved.get("steps"), config.steps):
        logger.warning(
            "steps: was %s, is %s: the learning rate falls over all steps, so the rest of the run differs from what it"
            " would have been",
            *(was, config.steps),
        )


def weights_key(saved: dict[str, Any]) -> str:
    """Returns the key that takes the weights in a checkpoint with this configuration: a model's, or an adapter's."""
    return "adapter.weights" if saved.get("adapter") else "model.weights"


def changed_values(config: DictConfig, saved: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns (old value, new value), each as one line, of each key that differs from `saved`; "absent" if not set."""
    was, now = _flat(saved), _flat(parse_yaml(config_text(config)))
    return {
        name: (_shown(was.get(name, ABSENT)), _shown(now.get(name, ABSENT)))
        for name in sorted(was.keys() | now.keys())
        if not _same(was.get(name, ABSENT), now.get(name, ABSENT))
    }


def _same(was: Any, now: Any) -> bool:
    """Tells whether two values are equal, as texts or as the numbers that they spell: 0 is 0.0."""
    try:
        return was == now or float(was) == float(now)
    except (TypeError, ValueError):
        return False


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    values = ABSENT_KEYS | dict(leaves_of(config))
    if values.get("optimizer._target_") in SAME_OPTIMIZER:
        values["optimizer._target_"] = SAME_OPTIMIZER[0]
    return values


def _shown(value: Any) -> str:
    return shortened(" ".join(str(value).split()), 80)
