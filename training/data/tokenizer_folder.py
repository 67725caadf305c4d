"""The files of a tokenizer in a model's folder, or of a model on the Hugging Face Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.data.hub_client import HubName

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
# transformers chooses the class of a tokenizer by the model's type, which is in config.json.
PATTERNS = [TOKENIZER_FILE, *BESIDE, f"{TEMPLATES}/*.jinja", "config.json"]
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
    folder = hub.cached_folder(PATTERNS)
    return folder if folder is not None and has_tokenizer(folder) else None


def fetched_folder(hub: HubName) -> Path:
    """Returns the folder with the tokenizer of a model on the Hub, which is downloaded unless it is in the cache.

    Raises UserError for a name that the Hub does not know, for a model without a tokenizer, or without network.
    """
    if (folder := cached_folder(hub)) is not None:
        return folder
    from training.metrics.progress import phase

    with phase("downloading the tokenizer"):
        if not {*hub.files(KEY)} & {*MAKING}:
            raise hub.lacks(KEY, f"{TOKENIZER_FILE}: give {KEY}=FOLDER or OWNER/NAME of one that has")
        return hub.folder(KEY, PATTERNS)
