"""The keys of datasets of chats, and of pairs of answers in chats."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from training.config.declare import Built, number
from training.errors import UserError


class TrainOn(StrEnum):
    """What of a chat is trained on: each turn of the assistant, the last of them, or every token."""

    assistant = "assistant"
    last = "last"
    all = "all"


class TooLong(StrEnum):
    """What becomes of chats, or pairs, that are longer than a row: left out, cut at the end, or the run is refused."""

    drop = "drop"
    truncate = "truncate"
    refuse = "refuse"


@dataclass
class OfMessages(Built):
    """The keys of every dataset whose rows have messages."""

    # One pattern, a list of them, or null; OmegaConf has no type for that.
    files: Any = MISSING
    name: str | None = MISSING
    config_name: str | None = MISSING
    split: str = MISSING
    revision: str | None = MISSING
    # A dictionary of columns by their names here, or null.
    columns: Any = MISSING
    template: str | None = MISSING
    tokenizer: str | None = MISSING
    too_long: TooLong = MISSING
    eval_files: Any = MISSING
    eval_share: float = number(at_least=0, at_most=0.5)


@dataclass
class Chats(OfMessages):
    _target_: str = "training.data.chats.chat.Chats"
    train_on: TrainOn = MISSING
    packed: bool = MISSING


@dataclass
class Preferences(OfMessages):
    _target_: str = "training.data.chats.preferences.Preferences"


def check_chats(dataset: DictConfig) -> None:
    """Refuses keys that contradict each other, or have a type of no use. Raises UserError."""
    for key in ("files", "eval_files"):
        check_patterns(f"dataset.{key}", dataset[key])
    if (dataset.files is None) == (dataset.name is None):
        given = (
            "dataset.files=null dataset.name=null: give one of them"
            if dataset.files is None
            else f"dataset.files={dataset.files} dataset.name={dataset.name}: give one of them, and the other as null"
        )
        raise UserError(f"{given}: files=PATH of .jsonl, .json or .parquet files, or name=OWNER/NAME of the Hub")
    columns = dataset.columns
    if columns is not None and not (
        OmegaConf.is_dict(columns) and all(name is None or isinstance(name, str) for name in columns.values())
    ):
        raise UserError(f"dataset.columns={columns}: must be names by names, {{messages: COLUMN}}, or null")


def check_patterns(key: str, value: Any) -> None:
    """Refuses what is neither null, nor a path or pattern, nor a list of them. Raises UserError."""
    if value is None or isinstance(value, str):
        return
    if not OmegaConf.is_list(value) or not value or not all(isinstance(name, str) for name in value):
        raise UserError(
            f"{key}={value}: must be a path or pattern (chats/*.jsonl), or a list of them ([a.jsonl,b.json])"
        )
