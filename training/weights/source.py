"""Finds `model.source`: the name of an architecture, a folder, or a model on the Hugging Face Hub.

The configuration of a model on the Hub is downloaded first, and alone; `training.weights.files` finds its weights.
"""

import hashlib
from pathlib import Path

from omegaconf import DictConfig

from models.diffusion_files import PIPELINE_FILE, SCHEDULER_FILE, scheduler_file
from training.config.declare import AUTO
from training.data.hub_client import HubName
from training.errors import UserError, as_user_error
from training.runs.files import home_expanded
from training.weights.files import CONFIG_FILE, CONFIG_FILES, PICTURES_FILE, part_in, part_of, weight_files_in

KEY = "model.source"
SCHEDULER = "task.scheduler"
# Weights that are not loaded: of torch, of llama.cpp, of Keras and of Flax.
OTHER_FORMATS = ("*model*.bin", "*.pth", "*.gguf", "*model*.h5", "*model*.msgpack")
SCHEDULER_FILES = [PIPELINE_FILE, f"scheduler/{SCHEDULER_FILE}"]


def local_source(given: str) -> str:
    """Returns model.source as builders of models take it: for a name on the Hub the local folder of its config.json.

    The folder is downloaded unless it is in the client's cache. What is no name on the Hub is returned as it is. Raises
    UserError for a name that the Hub does not know, and if the Hub cannot be reached.
    """
    if not given:
        raise UserError(f"{KEY}=: give a model type, a class or a folder, or the name of a model on the Hub")
    path = home_expanded(KEY, given)
    if path.is_dir():
        return str(path)
    hub = HubName.of(given)
    if hub is None:
        return given
    cached = hub.cached_folder(CONFIG_FILES)
    if cached is not None and any((cached / file).is_file() for file in CONFIG_FILES):
        return str(cached)
    # Not at the top: the tasks, whose keys every command reads, import this file.
    from training.metrics.progress import phase

    with phase("downloading the model's configuration"):
        if part_of(hub.files(KEY)) is None:
            raise hub.lacks(KEY, f"{CONFIG_FILE}: choose one that has")
        return str(hub.folder(KEY, [*CONFIG_FILES, PICTURES_FILE]))


def source_digest(model: DictConfig) -> str | None:
    """Returns the SHA-256 of the config.json of model.source; None if the model has no source, or one without files."""
    if "source" not in model:
        return None
    folder = Path(local_source(model.source))
    file = folder / part_in(folder) / CONFIG_FILE
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def scheduler_of(model: DictConfig) -> Path | None:
    """Returns the scheduler_config.json in the pipeline of `model.weights`, else of `model.source`; None for neither.

    The file of a pipeline on the Hub is downloaded, with the pipeline's configuration, unless it is in the client's
    cache. Raises UserError for a name that the Hub does not know, and if the Hub cannot be reached.
    """
    for name in ("weights", "source"):
        given = model.get(name)
        if given is None:
            continue
        path, hub = home_expanded(f"model.{name}", given), HubName.of(given)
        if not path.exists() and hub is not None:
            path = hub.cached_folder(SCHEDULER_FILES)
            if path is None:
                # Raises a UserError that explains a name which the Hub does not know.
                hub.files(f"model.{name}")
            if path is None or scheduler_file(path) is None:
                path = hub.folder(f"model.{name}", SCHEDULER_FILES)
        if path.exists() and (file := scheduler_file(path)):
            return file
    return None


def scheduler_given(given: str | None, model: DictConfig) -> Path | None:
    """Returns the file of task.scheduler, for auto the model's; None: none. Raises UserError if it is missing."""
    if given is None:
        return None
    if given != AUTO:
        if (file := scheduler_file(home_expanded(SCHEDULER, given))) is None:
            raise UserError(
                f"{SCHEDULER}={given}: no {SCHEDULER_FILE} there: give that file, its folder, or a pipeline's"
            )
        return file
    file = scheduler_of(model)
    if file is None and (weights := model.get("weights")):
        raise UserError(
            f"{SCHEDULER}={AUTO}: there is no {SCHEDULER_FILE} beside model.weights={weights}, so what the model"
            f" predicts is not known: give {SCHEDULER}=FILE, or null if this task with its defaults trained it"
        )
    return file


def weights_of_source(model: DictConfig) -> str | None:
    """Returns the value for model.weights=auto: model.source if it has weights, None if it names an architecture.

    Raises UserError for a folder with a damaged index, or with weights in other formats alone.
    """
    path = home_expanded(KEY, model.source)
    if path.is_dir():
        with as_user_error(f"{KEY}={model.source}: ", after=", or give model.weights=null"):
            if weight_files_in(path):
                return model.source
        own = path / part_in(path)
        if others := [file.name for form in OTHER_FORMATS for file in own.glob(form)]:
            raise UserError(
                f"{KEY}={model.source}: has its weights as {others[0]} and not as .safetensors, which from_pretrained"
                " and save_pretrained make of them: give the folder of these, or model.weights=null for the seed"
            )
        return None
    return model.source if HubName.of(model.source) else None
