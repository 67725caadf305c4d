"""The folder of a pipeline of diffusers: a local one, or that of a name on the Hugging Face Hub."""

from pathlib import Path

from models.diffusion_files import PIPELINE_FILE
from models.json_files import read_object
from models.quiet_imports import without_remarks
from training.data.hub_client import HubName, ask_hub
from training.metrics.progress import phase
from training.runs.files import home_expanded

KEY = "model.source"


def pipeline_folder(given: str) -> Path:
    """Returns the folder of the pipeline that `model.source` names: a folder, OWNER/NAME or OWNER/NAME@REVISION.

    Diffusers downloads what a pipeline of the Hub needs, unless all is in the client's cache. What is neither a folder
    nor such a name is returned as a path. Raises UserError for a name that the Hub does not know, a model without
    safetensors files, and without a network or permission.
    """
    path, hub = home_expanded(KEY, given), HubName.of(given)
    if path.exists() or hub is None:
        return path
    return _cached(hub) or _downloaded(hub)


def _cached(hub: HubName) -> Path | None:
    try:
        found = _fetched(hub, local_files_only=True)
        index = read_object(found / PIPELINE_FILE, "download the pipeline again")
    # It is not here, or not whole: a download says or mends that.
    except (OSError, ValueError):
        return None
    # Of a copy without a list of its files, diffusers takes any part for the whole.
    parts = [name for name, value in index.items() if isinstance(value, list) and name[0] != "_" and value[0]]
    return found if all((found / part).is_dir() for part in parts) else None


def _downloaded(hub: HubName) -> Path:
    # Raises a UserError that explains a name which the Hub does not know.
    names = hub.files(KEY)
    if PIPELINE_FILE not in names:
        raise hub.lacks(KEY, f"{PIPELINE_FILE}: take model=diffusers, or a pipeline")
    if not any(name.endswith(".safetensors") for name in names):
        raise hub.lacks(KEY, ".safetensors file: choose one that has")
    with phase("downloading the pipeline"):
        return ask_hub(lambda *_, **__: _fetched(hub), hub.name, f"{KEY}={hub}", "model", hub.by_hand(KEY))


def _fetched(hub: HubName, **options: bool) -> Path:
    from huggingface_hub import constants

    with without_remarks():
        from diffusers import DiffusionPipeline

        # Only safetensors: a pickled file may run code when it is loaded.
        options |= {"use_safetensors": True, "cache_dir": constants.HF_HUB_CACHE}
        return Path(DiffusionPipeline.download(hub.name, revision=hub.revision, **options))
