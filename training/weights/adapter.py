"""The adapter of a run: put into the model on the meta device, filled where the mode has made its memory."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from torch import nn

from models.adapter_files import CONFIG_FILE, GIVE_OTHERS, check_adapter, load_adapter, place_of
from models.adapters import initialise_adapters, inject
from models.json_files import read_object
from models.weights import first_and_count
from training.config.adapter import has_adapter
from training.errors import UserError, as_user_error
from training.metrics.progress import phase
from training.runs.checkpoint_files import refuse_run
from training.runs.files import home_expanded

KEY = "adapter.weights"

logger = logging.getLogger(__name__)


def add_adapter(model: nn.Module, config: DictConfig, dtype: torch.dtype) -> None:
    """Puts the adapter of `config` into `model`, which freezes. Raises UserError for targets that it lacks."""
    values = OmegaConf.to_container(config.adapter, resolve=True)
    keys = {name: value for name, value in values.items() if not name.startswith("_") and name != "weights"}
    asked = [*(keys["targets"] or ()), *(keys["modules_to_save"] or ())]
    only = "; text encoders do not train, only the network" if any("text_encoder" in name for name in asked) else ""
    try:
        with as_user_error("adapter.", after=only):
            inject(model, get_class(values["_target_"])(**keys), dtype)
    except ModuleNotFoundError as error:
        raise UserError(f"adapter: the package {error.name} is not installed: pip install {error.name}") from error


def warn_of_unused(model: nn.Module) -> None:
    """Warns of adapters that got no gradient in the first backward, for example because their layer was not called."""
    unused = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        logger.warning(
            "adapter: %s%s got no gradient in the first step: their layers were not computed, or other modules read the"
            " weights; leave them out with adapter.targets",
            unused[0],
            more,
        )


@dataclass(frozen=True)
class RunAdapter:
    """The values that the adapter of a run starts from: those at `path`, or a function of `seed`."""

    seed: int
    given: str | None
    path: Path | None

    @classmethod
    def of(cls, config: DictConfig, model: nn.Module, starts: bool) -> Self | None:
        """Returns the adapter of a run; None if the run trains the whole model.

        Without `starts` the run resumes: a checkpoint fills the adapter, and adapter.weights is not read. Warns of
        parts of adapter.weights that are for a text encoder, and where others were trained with another dropout or
        beside another base. Raises UserError if the other parts do not fit `model`.
        """
        if not has_adapter(config):
            return None
        given = config.adapter.weights if starts else None
        if given is None:
            return cls(config.seed, None, None)
        path = home_expanded(KEY, given)
        refuse_run(KEY, given, path)
        with as_user_error(f"{KEY}={given}: "):
            place, left_out = place_of(model, path), check_adapter(model, path)
        if left_out:
            logger.warning("%s=%s: %s left out, of a text encoder", KEY, given, first_and_count(left_out))
        if place.is_dir():
            _warn_of_other(config, place)
        return cls(config.seed, given, path)

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Fills the adapter of `model`; its base must be filled before. Raises UserError for files that do not fit."""
        with phase("initialising the adapter"), as_user_error("adapter=dora: "):
            initialise_adapters(model, self.seed, device)
        if self.path is not None:
            with as_user_error(f"{KEY}={self.given}: "):
                load_adapter(model, self.path)


def _warn_of_other(config: DictConfig, folder: Path) -> None:
    """Warns where the adapter in `folder` was trained with another dropout or beside another base, as peft's file says.

    A base is told by the last part of its name: a copy on this machine has its folder in place of its owner.
    """
    stored, weights = read_object(folder / CONFIG_FILE, GIVE_OTHERS), config.model.weights
    base, dropout = stored.get("base_model_name_or_path"), stored.get("lora_dropout", 0.0)
    if base and Path(base).name != Path(weights or "").name.partition("@")[0]:
        logger.warning("%s=%s: its base is %s, and here model.weights=%s", KEY, folder, base, weights or "null")
    if dropout != config.adapter.dropout:
        rates = config.adapter.dropout, dropout
        logger.warning("%s=%s: adapter.dropout=%s, and it was trained with lora_dropout=%s", KEY, folder, *rates)
