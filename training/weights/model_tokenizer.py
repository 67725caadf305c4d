"""Reads what comes with a model's weights: tokenizer (dataset.tokenizer=auto), config.json, ids that end a text.

A model knows an id only as the token that it was trained on. So loaded weights need their own tokenizer, and another
one is refused; a model that begins from the seed may have the tokenizer of bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from models.json_files import read_object
from training.config.declare import AUTO
from training.data.hub_client import HubName
from training.data.library_tokenizer import TOKENIZER_FILE, cached_folder, has_tokenizer
from training.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from training.errors import UserError, as_user_error
from training.runs.checkpoint_files import DamagedError, read_config
from training.runs.files import CONFIG_FILE as RUN_CONFIG_FILE
from training.runs.files import home_expanded
from training.weights.files import CONFIG_FILE, GENERATION_FILE, ModelWeights

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
    """Returns the tokenizer that comes with the model described by `model`; None if there is none.

    `model.weights` must not be auto any more. The tokenizer is the one beside the weights, for a checkpoint that of its
    run, else the one of model.source. For a name on the Hub it is that name; whether the Hub has a tokenizer is not
    checked.
    """
    if model.weights is not None and (found := _of_place(WEIGHTS, model.weights)) is not None:
        return found
    source = model.get("source")
    return None if source is None else _of_place(SOURCE, source)


def settled_tokenizer(config: DictConfig) -> str | None:
    """Returns the value for dataset.tokenizer=auto; None: bytes. Raises UserError for weights without a tokenizer."""
    weights = config.model.weights
    if weights is not None:
        # What is wrong with the weights is said first.
        ModelWeights.find(weights, ask=False)
    own = own_tokenizer(config.model)
    if own is None and weights is not None:
        raise UserError(
            f"{KEY}={AUTO}: {WEIGHTS}={weights} has no tokenizer: a model of pictures takes a dataset of pictures"
            f" (dataset=captioned, say); for another give {KEY}=FOLDER with that of the model, or null if it was"
            " trained on bytes"
        )
    return None if own is None else own.value


def refuse_foreign_tokenizer(config: DictConfig, download: bool = False) -> None:
    """Raises UserError, naming an id, if the dataset's tokenizer has an id for another token than the model's own has.

    Tokenizers on the Hub that are not in the client's cache are compared only with `download`.
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
    if path.is_dir() and (path / RUN_CONFIG_FILE).is_file():
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


def origin_of(config: DictConfig) -> Path | None:
    """Returns the local folder with the config.json of the model whose token ids the run of `config` uses.

    It is the folder of the weights, for a checkpoint that of the weights that its run began from, else the folder of
    model.source. Returns None if the run has ids of its own, and if there is no such local folder.
    """
    if config.model.weights is None and not brought_tokenizer(config):
        return None
    return folder_with(CONFIG_FILE, config.model, (WEIGHTS, SOURCE))


def values_in(folder: Path | None, name: str = CONFIG_FILE) -> dict[str, Any]:
    """Returns the values in a JSON file of `folder`; {} where there is none. Raises UserError for a damaged one."""
    if folder is None or not (folder / name).is_file():
        return {}
    with as_user_error(""):
        return read_object(folder / name, "download it again")


def ends_of(folder: Path | None) -> tuple[int, ...]:
    """Returns the ids that end a text, by generation_config.json and config.json in `folder`; () for no files."""
    found = [values_in(folder, name).get("eos_token_id") for name in (GENERATION_FILE, CONFIG_FILE)]
    ids = [number for entry in found for number in (entry if isinstance(entry, list) else [entry])]
    return tuple(dict.fromkeys(number for number in ids if isinstance(number, int)))


def stops_of(config: DictConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the ids that end a text of the run's model: by its tokenizer, and by the configuration it came with."""
    return tokenizer.stops | set(ends_of(origin_of(config)))


def folder_with(name: str, model: Mapping[str, Any], keys: Sequence[str]) -> Path | None:
    """Returns the first local folder with a file `name` that `model` names by one of `keys`; None without one.

    In place of a checkpoint's folder it is that by which the checkpoint's run began. Raises UserError for a damaged
    checkpoint.
    """
    for key in keys:
        given = model.get(key.removeprefix("model."))
        if given is None or (folder := folder_of(key, given)) is None:
            continue
        is_of_run = (folder / RUN_CONFIG_FILE).is_file()
        if is_of_run and (of_run := folder_with(name, model_of_run(folder, f"{key}={given}"), keys)) is not None:
            return of_run
        if (folder / name).is_file():
            return folder
    return None


def folder_of(key: str, given: str) -> Path | None:
    """Returns the local folder that `given`, a value of `key`, names: a folder, or that of a file or a Hub name.

    Returns None for what is neither here nor in the Hub client's cache.
    """
    path = home_expanded(key, given)
    if path.exists():
        return path if path.is_dir() else path.parent
    hub = HubName.of(given)
    return None if hub is None else hub.cached_folder([CONFIG_FILE])


def model_of_run(folder: Path, given: str) -> dict[str, Any]:
    """Returns the `model` of the run whose checkpoint is in `folder`. Raises UserError, which begins with `given`."""
    with as_user_error(f"{given}: ", DamagedError, after=": give another checkpoint"):
        read_config(folder)
    # `read_config` has found it harmless, with texts for values; read again, the values have their types.
    model = yaml.safe_load((folder / RUN_CONFIG_FILE).read_text()).get("model")
    return model if isinstance(model, dict) else {}
