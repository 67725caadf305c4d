"""A tokenizer of a file or a folder, as the library tokenizers and transformers have it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.data.hub_client import HubName
from training.errors import UserError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

KEY = "dataset.tokenizer"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
# The other files of a tokenizer in the folders of published models.
BESIDE = (
    CONFIG_FILE, "special_tokens_map.json", "added_tokens.json", TEMPLATE_FILE, "chat_template.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
)  # fmt: skip
# The folder with a model's further chat templates, such as one for retrieval.
TEMPLATES = "additional_chat_templates"
# transformers chooses the class of a tokenizer by the model's type, which is in config.json.
PATTERNS = [TOKENIZER_FILE, *BESIDE, f"{TEMPLATES}/*.jinja", "config.json"]
# A folder with one of these files has a tokenizer; the other files alone make none.
MAKING = (TOKENIZER_FILE, "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
# In this order: Llama 3; GPT-2 and Qwen; Llama 2 and Mistral; Gemma; DeepSeek; two that are common elsewhere.
END_OF_TEXT_NAMES = (
    "<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|eos|>", "[EOS]",
)  # fmt: skip
# A text that every tokenizer can encode, to find the special tokens that the post-processor puts around a text.
TEXT = "a"
ADVICE = (
    f"give a {TOKENIZER_FILE}, a folder or a model of the Hub with one, or, for a model from the seed, null for bytes"
)


class LibraryTokenizer:
    """A tokenizer of the library tokenizers, whose truncation, padding and BPE dropout are switched off.

    The token that ends a text is `end_of_text` if given, else the first of END_OF_TEXT_NAMES in the vocabulary, else
    the last token that the post-processor puts behind a text. `begin` and `end` are the ids that the post-processor
    puts around a document; where it puts none behind it, `end` is the id that ends a text. `stops` are the ids that end
    a generated text. `pretrained` is transformers' tokenizer with the same ids; if None is given, one is made with
    `special`, the texts of special tokens by name, and `template`, the chat template.

    Raises UserError if no token ends a text; later if a text cannot be encoded.
    """

    def __init__(
        self,
        given: str,
        tokenizer: Tokenizer,
        end_of_text: str | None = None,
        pretrained: PreTrainedTokenizerFast | None = None,
        special: dict[str, str] | None = None,
        template: str | None = None,
    ):
        self._given, self._tokenizer = given, tokenizer
        self._special, self._template = special or {}, template
        if pretrained is not None:
            self.pretrained = pretrained
        model = tokenizer.model
        if getattr(model, "dropout", None):
            logger.warning(
                "dataset.tokenizer=%s: its BPE dropout of %s is off here, so that a text has the same tokens each time",
                given,
                model.dropout,
            )
            model.dropout = None
        # The file may cut or pad inputs to a model's window, which would drop text or add padding here.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids = tokenizer.get_vocab(with_added_tokens=True)
        self.begin, end = self._around()
        names = END_OF_TEXT_NAMES if end_of_text is None else (end_of_text,)
        found = next((ids[name] for name in names if name in ids), end[-1] if end else None)
        if found is None:
            raise UserError(
                f"{KEY}={given}: has no end-of-text token (looked for {' '.join(names)}): name the token that ends a"
                ' text in a tokenizer_config.json beside it, {"eos_token": "TOKEN"}'
            )
        self.end_of_text_id: int = found
        self.end: tuple[int, ...] = end or (found,)
        self.stops = frozenset({found})
        # Ids may have gaps, so the largest id can be above the number of tokens.
        self.vocab_size: int = max(ids.values()) + 1

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Returns one uint32 array for each text. It tokenises in threads; their number does not change the result."""
        with refusing(f"{KEY}={self._given}: cannot encode the text"):
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_spans(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns what `encode_batch` does, each with the characters from and to which a token is, int64 [n, 2]."""
        with refusing(f"{KEY}={self._given}: cannot encode the text"):
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            (np.array(each.ids, dtype=np.uint32), np.array(each.offsets, dtype=np.int64).reshape(-1, 2))
            for each in encodings
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of these ids without special tokens; bytes that are not UTF-8 become U+FFFD."""
        with refusing(f"{KEY}={self._given}: cannot decode the tokens"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def id_of(self, token: str) -> int | None:
        """Returns the id of the token that is written so, None if there is none."""
        return self._tokenizer.token_to_id(token)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens, by their text."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @cached_property
    def pretrained(self) -> PreTrainedTokenizerFast:
        """One of transformers with the same ids."""
        from transformers import PreTrainedTokenizerFast

        special = {"eos_token": self._tokenizer.id_to_token(self.end_of_text_id), **self._special}
        made = PreTrainedTokenizerFast(tokenizer_object=self._tokenizer, **special)
        if self._template is not None:
            made.chat_template = self._template
        return made

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the ids that the post-processor puts before and after a text."""
        if not self._tokenizer.num_special_tokens_to_add(is_pair=False):
            return (), ()
        with refusing(f"{KEY}={self._given}: cannot encode {TEXT!r}"):
            bare, whole = (self._tokenizer.encode(TEXT, add_special_tokens=around).ids for around in (False, True))
        before = next(n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
        return tuple(whole[:before]), tuple(whole[before + len(bare) :])


@contextmanager
def refusing(before: str, advice: str = ADVICE) -> Iterator[None]:
    """Raises a UserError for any error of the library in the block: `before`, its message and `advice`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises Exception itself, and its panics are no Exception
        raise UserError(f"{before} ({first_line(error)}): {advice}") from error


def of_file(given: str, path: Path) -> LibraryTokenizer:
    """Reads a tokenizer.json, and what tokenizer_config.json beside it says. Raises UserError for another file.

    One that names a class has that of its folder: the class may replace what cuts texts, and has settings of its own.
    """
    from tokenizers import Tokenizer

    values = values_of(path.parent)
    if path.name == TOKENIZER_FILE and "tokenizer_class" in values:
        return of_folder(given, path.parent)
    with refusing(f"{KEY}={given}: not a Hugging Face tokenizers JSON file"):
        tokenizer = Tokenizer.from_file(str(path))
    special = {name: text for name in values if name.endswith("_token") and (text := token_in(values, name))}
    known = {name: text for name, text in special.items() if tokenizer.token_to_id(text) is not None}
    template = path.parent / TEMPLATE_FILE
    text = template.read_text() if template.is_file() else values.get("chat_template")
    return LibraryTokenizer(
        given, tokenizer, special.get("eos_token"), special=known, template=text if isinstance(text, str) else None
    )


def of_folder(given: str, folder: Path) -> LibraryTokenizer:
    """Reads the tokenizer in a folder as AutoTokenizer does, without code from the folder.

    Raises UserError for a folder without a tokenizer, or whose tokenizer is not of the library tokenizers.
    """
    if not has_tokenizer(folder):
        raise UserError(f"{KEY}={given}: the folder has no {TOKENIZER_FILE}: {ADVICE}")
    from transformers import AutoTokenizer

    with refusing(f"{KEY}={given}: transformers cannot load it"):
        pretrained = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    if not getattr(pretrained, "is_fast", False):
        raise UserError(f"{KEY}={given}: {type(pretrained).__name__} is none of the library tokenizers: {ADVICE}")
    return LibraryTokenizer(given, pretrained.backend_tokenizer, pretrained.eos_token, pretrained)


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
    """Returns the text of the special token `name` in `values_of`, where it is TEXT or {"content": TEXT}."""
    token = values.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def cached_folder(hub: HubName) -> Path | None:
    """Returns the folder in the Hub client's cache with the tokenizer of a model; None if the cache has none."""
    folder = hub.cached_folder(PATTERNS)
    return folder if folder is not None and has_tokenizer(folder) else None


def fetched_folder(hub: HubName) -> Path:
    """Returns the local folder with the tokenizer of a model on the Hub, downloaded if need be.

    Raises UserError for a model without a tokenizer, and if the download fails.
    """
    if (folder := cached_folder(hub)) is not None:
        return folder
    from training.metrics.progress import phase

    with phase("downloading the tokenizer"):
        if not {*hub.files(KEY)} & {*MAKING}:
            raise hub.lacks(KEY, f"{TOKENIZER_FILE}: give {KEY}=FOLDER or OWNER/NAME of one that has")
        return hub.folder(KEY, PATTERNS)
