"""Finds `model.source`: the name of an architecture, a folder, or a model on the Hugging Face Hub.

The configuration of a model on the Hub is downloaded first, and alone; `training.weights.files` finds its weights.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from training.data.hub_client import HubName, ask_hub
from training.errors import UserError, first_line
from training.metrics.progress import phase
from training.runs.files import home_expanded
from training.weights.files import CONFIG_FILE, CONFIG_FILES, part_in, part_of, weight_files_in

KEY = "model.source"


def local_source(given: str) -> str:
    """Returns what the builders of models take: `given`, or the folder with the configuration of a model on the Hub.

    Such a configuration is downloaded into the cache of the Hub's client, unless it is there.

    Raises UserError for a name that the Hub does not know, or if it cannot be reached.
    """
    if not given:
        raise UserError(f"{KEY}=: give a model type, a class or a folder, or the name of a model on the Hub")
    path = home_expanded(KEY, given)
    if path.is_dir():
        return str(path)
    hub = HubName.of(given)
    if hub is None:
        return given
    from huggingface_hub import HfApi, constants, snapshot_download

    wanted = {"revision": hub.revision, "cache_dir": constants.HF_HUB_CACHE, "allow_patterns": CONFIG_FILES}
    cached = partial(snapshot_download, hub.name, **wanted)
    try:
        folder = cached(local_files_only=True)
        if part_of(_names_in(Path(folder))) is not None:
            return folder
    except (OSError, ValueError):  # not there
        pass
    by_hand = hub.by_hand(KEY)
    key = f"{KEY}={given}: no such folder here; as a name on the Hub"
    with phase("downloading the model's configuration"):
        info = ask_hub(partial(HfApi().model_info, revision=hub.revision), hub.name, key, "model", by_hand)
        if part_of([entry.rfilename for entry in info.siblings or ()]) is None:
            raise UserError(f"{key}: that model has no {CONFIG_FILE}: choose one that has")
        try:
            return cached()
        except Exception as error:  # the client's errors have no common base class
            raise UserError(f"{key}: the download failed ({first_line(error)}); {by_hand}") from error


def source_digest(model: DictConfig) -> str | None:
    """Returns the SHA-256 of the config.json from which the model of `model.source` is made.

    None: it is made from the name of an architecture, or by no library.
    """
    if "source" not in model:
        return None
    folder = Path(local_source(model.source))
    file = folder / part_in(folder) / CONFIG_FILE
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def weights_of_source(model: DictConfig) -> str | None:
    """Returns the `model.weights` that `auto` stands for: those of the source, or None for an architecture's name.

    Those of a model on the Hub are its own, without a look; those of a folder are, if it has any. Raises UserError for
    an index that cannot be used.
    """
    path = home_expanded(KEY, model.source)
    if path.is_dir():
        try:
            return model.source if weight_files_in(path) else None
        except ValueError as error:
            raise UserError(f"{KEY}={model.source}: {error}, or give model.weights=null") from error
    return model.source if HubName.of(model.source) else None


def _names_in(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
