"""Facts beside a model's weights: the folder of its config.json, and the tokens that end its texts there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from models.json_files import read_object
from training.data.hub_client import HubName
from training.data.tokenizer import Tokenizer
from training.errors import as_user_error
from training.runs.files import CONFIG_FILE as RUN_CONFIG_FILE
from training.runs.files import home_expanded
from training.runs.manifest import DamagedError, read_config
from training.weights.files import CONFIG_FILE, GENERATION_FILE
from training.weights.model_tokenizer import SOURCE, WEIGHTS, brought_tokenizer


def origin_of(config: DictConfig) -> Path | None:
    """Returns the local folder with the config.json of the model whose ids the run of `config` has.

    It is that of the weights, else that of the source. The origin of a checkpoint of a run is that of the run. None for
    a model that begins from the seed with ids of its own, or whose files are not here.
    """
    if config.model.weights is None and not brought_tokenizer(config):
        return None
    return _origin(config.model)


def values_in(folder: Path | None, name: str = CONFIG_FILE) -> dict[str, Any]:
    """Returns the values in a JSON file of `folder`; {} where there is none. Raises UserError for a damaged one."""
    if folder is None or not (folder / name).is_file():
        return {}
    with as_user_error(""):
        return read_object(folder / name, "download it again")


def ends_of(folder: Path | None) -> tuple[int, ...]:
    """Returns the ids that end a text by the generation_config.json and the config.json in `folder`."""
    found = [values_in(folder, name).get("eos_token_id") for name in (GENERATION_FILE, CONFIG_FILE)]
    ids = [number for entry in found for number in (entry if isinstance(entry, list) else [entry])]
    return tuple(dict.fromkeys(number for number in ids if isinstance(number, int)))


def stops_of(config: DictConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the ids at which a text of the run's model ends: those of its tokenizer, and those it came with."""
    return tokenizer.stops | set(ends_of(origin_of(config)))


def _origin(model: Mapping[str, Any]) -> Path | None:
    for key, given in ((WEIGHTS, model.get("weights")), (SOURCE, model.get("source"))):
        if given is None or (folder := folder_of(key, given)) is None:
            continue
        is_of_run = (folder / RUN_CONFIG_FILE).is_file()
        if is_of_run and (of_run := _origin(model_of_run(folder, f"{key}={given}"))) is not None:
            return of_run
        if (folder / CONFIG_FILE).is_file():
            return folder
    return None


def folder_of(key: str, given: str) -> Path | None:
    """Returns the local folder that a value of `key` leads to, that of a file, or of a model in the Hub's cache."""
    path = home_expanded(key, given)
    if path.exists():
        return path if path.is_dir() else path.parent
    hub = HubName.of(given)
    return None if hub is None else hub.cached_folder([CONFIG_FILE])


def model_of_run(folder: Path, given: str) -> dict[str, Any]:
    """Returns the `model` of the run whose checkpoint is in `folder`. Raises UserError, which begins with `given`."""
    with as_user_error(f"{given}: ", DamagedError, after=": give another checkpoint"):
        read_config(folder)
    # It was found to be plain; here values have their types.
    model = yaml.safe_load((folder / RUN_CONFIG_FILE).read_text()).get("model")
    return model if isinstance(model, dict) else {}
