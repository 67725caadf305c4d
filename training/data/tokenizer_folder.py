"""The files of a tokenizer in a model's folder, or of a model on the Hugging Face Hub."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from training.data.hub_client import HubName, ask_hub
from training.errors import UserError, first_line

KEY = "dataset.tokenizer"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
# What published models have beside tokenizer.json.
BESIDE = (
    CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_FILE,
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)
# Templates of chats for other uses have files in a folder of their own.
TEMPLATES = "additional_chat_templates"
PATTERNS = (TOKENIZER_FILE, *BESIDE, f"{TEMPLATES}/*.jinja")
# One of these makes a tokenizer; the others belong to it.
MAKING = (TOKENIZER_FILE, "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


def has_tokenizer(folder: Path) -> bool:
    """Tells whether a folder has the files of a tokenizer."""
    return any((folder / name).is_file() for name in MAKING)


def files_in(folder: Path) -> dict[str, Path]:
    """Returns the files of the tokenizer in `folder`, by their names there."""
    found = [folder / name for name in (TOKENIZER_FILE, *BESIDE)] + sorted((folder / TEMPLATES).glob("*.jinja"))
    return {path.relative_to(folder).as_posix(): path for path in found if path.is_file()}


def values_of(folder: Path) -> dict[str, Any]:
    """Returns the values in the folder's tokenizer_config.json; {} if there is none that can be read."""
    try:
        values = json.loads((folder / CONFIG_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def token_in(values: dict[str, Any], name: str) -> str | None:
    """Returns the text of a special token in `values_of`: it is a string, or a mapping with its content."""
    token = values.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def cached_folder(hub: HubName) -> Path | None:
    """Returns the folder in the Hub client's cache that has the tokenizer of a model, None if it is not there."""
    try:
        folder = Path(_download(hub, local_files_only=True))
    except (OSError, ValueError):  # not there
        return None
    return folder if has_tokenizer(folder) else None


def fetched_folder(hub: HubName, given: str) -> Path:
    """Returns the folder with the tokenizer of a model on the Hub, which is downloaded unless it is in the cache.

    Raises UserError for a name that the Hub does not know, for a model without a tokenizer, or without network.
    """
    if (folder := cached_folder(hub)) is not None:
        return folder
    from huggingface_hub import HfApi

    from training.metrics.progress import phase

    by_hand = hub.by_hand(KEY)
    key = f"{KEY}={given}: no such file or folder here; as a name on the Hub"
    with phase("downloading the tokenizer"):
        info = ask_hub(partial(HfApi().model_info, revision=hub.revision), hub.name, key, "model", by_hand)
        if not {entry.rfilename for entry in info.siblings or ()} & set(MAKING):
            raise UserError(
                f"{key}: that model has no {TOKENIZER_FILE}: give {KEY}=FOLDER or OWNER/NAME of one that has"
            )
        try:
            return Path(_download(hub))
        except Exception as error:  # the client's errors have no common base class
            raise UserError(f"{key}: the download failed ({first_line(error)}); {by_hand}") from error


def _download(hub: HubName, **options: bool) -> str:
    from huggingface_hub import constants, snapshot_download

    # transformers chooses the class of a tokenizer by the model's type.
    patterns = [*PATTERNS, "config.json"]
    place = {"revision": hub.revision, "cache_dir": constants.HF_HUB_CACHE}
    return snapshot_download(hub.name, **place, allow_patterns=patterns, **options)
