"""Makes objects of options: the class that an option names in `_target_`, called with the values of its keys.

A class checks its own knobs and names them alone in its errors; here the path of the key comes before the name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from torch import nn

from offload import KnobError, Mode
from training.config.declare import AUTO
from training.errors import UserError


@contextmanager
def keys_under(path: str) -> Iterator[None]:
    """Raises a KnobError of the block as UserError, with `path.` before the name of the knob."""
    try:
        yield
    except KnobError as error:
        raise UserError(str(error.under(path))) from error


def make_mode(config: DictConfig, key: str = "offload") -> Mode:
    """Makes the mode of `config`, found under `key`, and that of its weights. Raises UserError naming the whole key."""
    weights = {"weights": make_mode(config.weights, f"{key}.weights")} if "weights" in config else {}
    return construct(config, key, **weights)


def check_optimizer(config: DictConfig) -> None:
    """Makes the optimizer of `config` for a parameter without memory. Raises UserError naming the whole key."""
    # The class has defaults for what is chosen later.
    known = OmegaConf.create({key: value for key, value in config.items() if value != AUTO})
    construct(known, "optimizer", params=[nn.Parameter(torch.empty(0, device="meta"))])


def construct(config: DictConfig, key: str, **given: Any) -> Any:
    """Makes the object that `config`, found under `key`, describes. Raises UserError naming the whole key."""
    values = OmegaConf.to_container(config, resolve=True)
    knobs = {name: value for name, value in values.items() if not name.startswith("_")}
    if knobs.get("resident") == AUTO:
        # Until `training.planning.plan` chooses.
        knobs["resident"] = 0
    with keys_under(key):
        return get_class(config._target_)(**knobs | given)
