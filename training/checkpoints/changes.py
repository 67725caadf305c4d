"""What of a configuration has changed since a checkpoint, and whether the run may go on with it."""

import logging
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from training.checkpoints.layout import CONFIG_FILE
from training.checkpoints.manifest import MAX_JSON_BYTES, DamagedError
from training.errors import UserError

logger = logging.getLogger(__name__)

# Makes texts of all values, whatever tag they have, and calls nothing; in C in little time however deep they nest.
_Loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
DEEPEST = 100

# What decides where a run computes, what it shows and when it ends, but not what it computes.
MAY_CHANGE = (
    "steps",
    "warmup_steps",
    "log_every",
    "offload.*",
    "recompute.*",
    "tracking.*",
    "checkpoint.*",
    "resume",
    "device",
    "hardware*",
    "vram_budget",
    "host_budget",
    "plan",
    "trace",
    "trace_step",
    "on_nonfinite",
    "optimizer.device_share",
    "optimizer.threads",
    "optimizer.compile",
)
# Both options of the optimizer compute the same from the same states; one of them has knobs that the other lacks.
SAME_OPTIMIZER = ("training.optim.AdamW", "offload.optimizer.adamw.HostAdamW")
ABSENT_OPTIMIZER_KEYS = {"optimizer.state_dtype": "fp32"}
ABSENT = "absent"


def config_text(config: DictConfig) -> str:
    """The configuration as a checkpoint keeps it: YAML of plain values, interpolations resolved."""
    return OmegaConf.to_yaml(config, resolve=True)


def refuse_changes(config: DictConfig, saved: dict[str, Any], folder: Path, key: str) -> None:
    """Compares `config` with `saved`, which `read_config` gave of the checkpoint in `folder`.

    `key` is what the user gave, to begin the message with. Raises UserError listing what has changed and may not.
    """
    was, now = _flat(saved), _flat(yaml.load(config_text(config), _Loader))
    changed = {
        name: (was.get(name, ABSENT), now.get(name, ABSENT))
        for name in sorted(was.keys() | now.keys())
        if was.get(name, ABSENT) != now.get(name, ABSENT)
    }
    refused = [name for name in changed if not any(fnmatchcase(name, pattern) for pattern in MAY_CHANGE)]
    if refused:
        listed = "; ".join(f"{name}: was {_shown(changed[name][0])}, is {_shown(changed[name][1])}" for name in refused)
        raise UserError(
            f"{key}: the configuration is not the checkpoint's in {listed}: give the old values to go on,"
            f" or begin a new run from these weights, model.weights={folder}"
        )
    if "steps" in changed and "schedule.final" in now:
        logger.warning(
            "steps: was %s, is %s: the learning rate falls over all steps, so the rest of this run is not that of the"
            " run as it was begun",
            *changed["steps"],
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of the checkpoint in `folder`; nothing in it is instantiated: every value is its text.

    Raises DamagedError where the file is no configuration.
    """
    path = folder / CONFIG_FILE
    try:
        if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
            raise DamagedError(f"{path} is missing or too large")
        text = path.read_text()
        depth = 0
        for event in yaml.parse(text, _Loader):
            # An alias that stands for many others would be a file of astronomical size.
            if isinstance(event, yaml.AliasEvent):
                raise DamagedError(f"{path} has YAML aliases, which no configuration has")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise DamagedError(f"{path} is nested deeper than any configuration")
        values = yaml.load(text, _Loader)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise DamagedError(f"{path} is no plain YAML file") from None
    if not isinstance(values, dict):
        raise DamagedError(f"{path} is no configuration")
    return values


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    values = ABSENT_OPTIMIZER_KEYS | dict(_leaves(config))
    if values.get("optimizer._target_") in SAME_OPTIMIZER:
        values["optimizer._target_"] = SAME_OPTIMIZER[0]
    return values


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
