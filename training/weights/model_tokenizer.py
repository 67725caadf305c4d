"""The tokenizer that a model was trained on: what dataset.tokenizer=auto stands for, and which others are refused.

Ids mean something to a model by the tokens that it was trained on. So weights bring their tokenizer, and bytes are for
models that begin from the seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from training.config.declare import AUTO
from training.data.hub_client import HubName
from training.data.tokenizer import ByteTokenizer, load_tokenizer
from training.data.tokenizer_folder import TOKENIZER_FILE, cached_folder, has_tokenizer
from training.errors import UserError, as_user_error
from training.runs.files import CONFIG_FILE, home_expanded
from training.runs.manifest import DamagedError, read_config
from training.weights.files import ModelWeights

KEY = "dataset.tokenizer"
WEIGHTS, SOURCE = "model.weights", "model.source"
# The tokenizer of bytes is a small file.
LARGEST_OF_BYTES = 2**16


@dataclass(frozen=True)
class OwnTokenizer:
    """The tokenizer of a model: a value of dataset.tokenizer, and what of the configuration brings it."""

    value: str | None
    of: str

    def is_here(self) -> bool:
        """Tells whether it can be read without a download."""
        hub = None if self.value is None or home_expanded(KEY, self.value).exists() else HubName.of(self.value)
        return hub is None or cached_folder(hub) is not None


def own_tokenizer(model: DictConfig) -> OwnTokenizer | None:
    """Returns the tokenizer of the model that `model`, whose weights are settled, describes; None if nothing has one.

    Weights bring that of their folder or of their name on the Hub, those of a run's checkpoint that of the run; where
    they have none, model.source does. One of the Hub is named without a look, unless it is in the client's cache.
    """
    if model.weights is not None and (found := _of_place(WEIGHTS, model.weights)) is not None:
        return found
    source = model.get("source")
    return None if source is None else _of_place(SOURCE, source)


def settled_tokenizer(config: DictConfig) -> str | None:
    """Returns the dataset.tokenizer that auto stands for; None is bytes.

    Raises UserError if there are weights, and nothing tells on which tokens they were trained.
    """
    weights = config.model.weights
    if weights is not None:
        # What is wrong with the weights is said first.
        ModelWeights.find(weights, ask=False)
    own = own_tokenizer(config.model)
    if own is None and weights is not None:
        raise UserError(
            f"{KEY}={AUTO}: {WEIGHTS}={weights} has no tokenizer: give {KEY}=FOLDER with that of the model, or null if"
            " it was trained on bytes"
        )
    return None if own is None else own.value


def refuse_foreign_tokenizer(config: DictConfig, download: bool = False) -> None:
    """Raises UserError if the dataset has ids that the loaded model was not trained on, and names one of them.

    Tokenizers that are on the Hub are looked at where they are in the client's cache, or with `download`.
    """
    if "tokenizer" not in config.dataset or config.model.weights is None:
        return
    given, own = config.dataset.tokenizer, own_tokenizer(config.model)
    if own is None or _place(given) == _place(own.value):
        return
    if not (download or (own.is_here() and tokenizer_is_here(config))):
        return
    known = {number: token for token, number in load_tokenizer(own.value).vocabulary.items()}
    for token, number in sorted(load_tokenizer(given).vocabulary.items(), key=lambda entry: entry[1]):
        if known.get(number) != token:
            there = f"is {known[number]!r}" if number in known else "stands for nothing"
            raise UserError(
                f"{KEY}={given or 'null'}: its token {token!r} has the id {number}, which {there} in the tokenizer"
                f" that the model was trained on, that of {own.of}: take {KEY}={AUTO}"
            )


def tokenizer_is_here(config: DictConfig) -> bool:
    """Tells whether the dataset's tokenizer, if it has one, can be read without a download."""
    return "tokenizer" not in config.dataset or OwnTokenizer(config.dataset.tokenizer, KEY).is_here()


def brought_tokenizer(config: DictConfig) -> bool:
    """Tells whether the dataset's tokenizer is the model's own."""
    if "tokenizer" not in config.dataset:
        return False
    own = own_tokenizer(config.model)
    return own is not None and _place(config.dataset.tokenizer) == _place(own.value)


def is_of_bytes(file: Path) -> bool:
    """Tells whether a tokenizer.json, as of an exported model, is the tokenizer of bytes."""
    from tokenizers import Tokenizer

    if not file.is_file() or file.stat().st_size > LARGEST_OF_BYTES:
        return False
    try:
        found = Tokenizer.from_file(str(file))
    except Exception:  # the library raises Exception itself; that it is none is said where it is loaded
        return False
    same = found.get_vocab(with_added_tokens=True) == ByteTokenizer().vocabulary
    return same and not found.num_special_tokens_to_add(is_pair=False)


def _of_place(key: str, given: str) -> OwnTokenizer | None:
    path, of = home_expanded(key, given), f"{key}={given}"
    if path.is_dir() and (path / CONFIG_FILE).is_file():
        return _of_checkpoint(path, of)
    if path.exists():
        folder = path if path.is_dir() else path.parent
        if not has_tokenizer(folder):
            return None
        if is_of_bytes(folder / TOKENIZER_FILE):
            return OwnTokenizer(None, of)
        return OwnTokenizer(given if path.is_dir() else str(folder), of)
    return None if HubName.of(given) is None else OwnTokenizer(given, of)


def _of_checkpoint(folder: Path, of: str) -> OwnTokenizer | None:
    """Returns the tokenizer of the run that saved a checkpoint; None where its dataset was no text."""
    with as_user_error(f"{of}: ", DamagedError, after=": give another checkpoint"):
        dataset = read_config(folder).get("dataset")
    value = dataset.get("tokenizer") if isinstance(dataset, dict) else None
    # Values are read as texts.
    return None if value is None else OwnTokenizer(None if value == "null" else value, of)


def _place(given: str | None) -> str | None:
    """Returns what two values have in common if they name one tokenizer: its folder, or its name on the Hub."""
    if given is None or not (path := home_expanded(KEY, given)).exists():
        return given
    path = path.resolve()
    return str(path.parent if path.name == TOKENIZER_FILE else path)
