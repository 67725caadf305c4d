"""The keys of datasets."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from training.config.declare import Built, number, renamed
from training.errors import UserError


class TrainOn(StrEnum):
    """The part of a chat that is trained on: each turn of the assistant, the last of them, or every token."""

    assistant = "assistant"
    last = "last"
    all = "all"


class TooLong(StrEnum):
    """The treatment of chats, or pairs, that are longer than a row: left out, cut at the end, or the run is refused."""

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
class Text(Built):
    """The keys of every dataset of text; the builder adds seed, seq_len and batch_size."""

    tokenizer: str | None = MISSING
    begin: str | None = MISSING
    end: str | None = MISSING
    max_tokens: int | None = number(at_least=1)
    eval_share: float = number(at_least=0, at_most=0.5)


@dataclass
class TextFiles(Text):
    _target_: str = "training.data.datasets.TextFiles"
    # One pattern or a list of them; OmegaConf has no type for that, so `check_dataset` checks it.
    files: Any = MISSING
    text_column: str = MISSING
    eval_files: Any = MISSING


@dataclass
class HubText(Text):
    _target_: str = "training.data.datasets.HubText"
    name: str = MISSING
    config_name: str | None = MISSING
    split: str = MISSING
    revision: str | None = MISSING
    text_column: str = MISSING
    shuffle_buffer: int = number(at_least=1)
    eval_split: str | None = MISSING


@dataclass
class SyntheticTokens(Built):
    _target_: str = "training.data.datasets.SyntheticTokens"
    vocab_size: int | None = number(at_least=1)


@dataclass
class SyntheticImages(Built):
    _target_: str = "training.data.synthetic_images.SyntheticImages"
    shape: list[int] = MISSING
    num_classes: int | None = number(at_least=1)
    # A dictionary of shapes by name, or null.
    condition: Any = MISSING


@dataclass
class ImageFolder(Built):
    _target_: str = "training.data.images.ImageFolder"
    folder: str = MISSING
    size: int = number(at_least=1)
    labels: bool = MISSING
    crop: str = MISSING
    flip: bool = MISSING
    ground: str = MISSING
    eval_share: float = number(at_least=0, at_most=0.5)


@dataclass
class CaptionedPictures(Built):
    _target_: str = "training.data.captioned.dataset.Captioned"
    # One folder, a list of them, or {folder: repeats}; OmegaConf has no type for that.
    folder: Any = MISSING
    name: str | None = MISSING
    config_name: str | None = MISSING
    split: str = MISSING
    revision: str | None = MISSING
    image_column: str = MISSING
    text_column: str = MISSING
    size: int = number(at_least=16)
    multiple: int = number(at_least=8)
    frames: int | None = number(at_least=2)
    fps: float | None = number(above=0)
    flip: bool = MISSING
    crops: int = number(at_least=1)
    ground: str = MISSING
    masked: bool = MISSING
    caption_dropout: float = number(at_least=0, at_most=1)
    eval_share: float = number(at_least=0, at_most=0.5)
    pipeline: str | None = MISSING
    precision: str = MISSING
    overrides: Any = MISSING


@dataclass
class Glyphs(Built):
    _target_: str = "training.data.glyphs.Glyphs"
    characters: str = MISSING
    size: int = number(at_least=8, at_most=256)
    labels: bool = MISSING
    count: int = number(at_least=1)
    variation: float = number(at_least=0)
    eval_share: float = number(at_least=0, at_most=0.5)


DATASETS = {
    "stdlib": renamed(Text, "training.data.datasets.StdlibText"),
    "text": TextFiles,
    "hub": HubText,
    "chat": Chats,
    "preferences": renamed(OfMessages, "training.data.chats.preferences.Preferences"),
    "synthetic": SyntheticTokens,
    "glyphs": Glyphs,
    "images": ImageFolder,
    "captioned": CaptionedPictures,
    "synthetic_images": SyntheticImages,
}


def check_dataset(dataset: DictConfig) -> None:
    """Refuses keys that contradict each other, or have a type of no use. Raises UserError."""
    kind = OmegaConf.get_type(dataset)
    if issubclass(kind, TextFiles):
        _check_patterns("dataset.files", dataset.files, "texts/*.txt", "a.txt,b.txt")
        _check_patterns("dataset.eval_files", dataset.eval_files, "texts/*.txt", "a.txt,b.txt", optional=True)
    if not issubclass(kind, OfMessages):
        return
    for key in ("files", "eval_files"):
        _check_patterns(f"dataset.{key}", dataset[key], "chats/*.jsonl", "a.jsonl,b.json", optional=True)
    if (dataset.files is None) == (dataset.name is None):
        given = (
            "dataset.files=null dataset.name=null: give one of them"
            if dataset.files is None
            else f"dataset.files={dataset.files} dataset.name={dataset.name}: give one of them, and the other as null"
        )
        raise UserError(f"{given}: files=PATH of .jsonl, .json or .parquet files, or name=OWNER/NAME of the Hub")
    for key, usual in (("config_name", None), ("split", "train"), ("revision", None)):
        if dataset.files is not None and dataset[key] != usual:
            raise UserError(
                f"dataset.{key}={dataset[key]}: has no effect on dataset.files, but on dataset.name: leave it out"
            )
    columns = dataset.columns
    if columns is not None and not (
        OmegaConf.is_dict(columns) and all(name is None or isinstance(name, str) for name in columns.values())
    ):
        raise UserError(f"dataset.columns={columns}: must be names by names, {{messages: COLUMN}}, or null")


def _check_patterns(key: str, value: Any, one: str, several: str, optional: bool = False) -> None:
    """Refuses what is neither a path or pattern, nor a list of them, nor null where that is `optional`."""
    if isinstance(value, str) or (value is None and optional):
        return
    if not OmegaConf.is_list(value) or not value or not all(isinstance(name, str) for name in value):
        raise UserError(f"{key}={value}: must be a path or pattern ({one}), or a list of them ([{several}])")
