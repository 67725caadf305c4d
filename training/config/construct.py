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
from offload.planning import without_compiler
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
    """Makes the mode of `config`, which is under `key`, with the mode for its weights if it has one.

    Raises UserError, which names a bad knob by its whole key.
    """
    weights = {"weights": make_mode(config.weights, f"{key}.weights")} if "weights" in config else {}
    return construct(config, key, **weights)


def check_optimizer(config: DictConfig) -> None:
    """Checks the optimizer of `config` by making one for an empty parameter. Raises UserError as `make_mode` does."""
    # What is auto is chosen later; until then the class's defaults stand for it.
    known = OmegaConf.create({key: value for key, value in config.items() if value != AUTO})
    without_compiler(construct)(known, "optimizer", params=[nn.Parameter(torch.empty(0, device="meta"))])


def construct(config: DictConfig, key: str, **given: Any) -> Any:
    """Makes the object that `config`, which is under `key`, describes; `given` are arguments that code adds.

    Raises UserError, which names a bad knob by its whole key.
    """
    values = OmegaConf.to_container(config, resolve=True)
    knobs = {name: value for name, value in values.items() if not name.startswith("_")}
    if knobs.get("resident") == AUTO:
        # `training.planning.plan` chooses it later.
        knobs["resident"] = 0
    with keys_under(key):
        return get_class(config._target_)(**knobs | given)
