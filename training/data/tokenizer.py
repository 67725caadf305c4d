"""Tokenizers: one for bytes, and those that the libraries of Hugging Face read.

A tokenizer has `vocab_size` (the rows that a model's embedding needs), `end_of_text_id`, `begin` and `end` (ids around
each document), `stops` (ids that end a generated text), `encode_batch(texts)`, which returns one numpy array for each
text and adds no special tokens, `decode(ids)`, `id_of(token)`, `vocabulary` (the ids by their text) and `pretrained`,
transformers' fast tokenizer with the same ids, which is made on first use.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from training.config.declare import AUTO
from training.data.hub_client import HubName
from training.data.library_tokenizer import (
    ADVICE,
    CONFIG_FILE,
    KEY,
    TOKENIZER_FILE,
    LibraryTokenizer,
    fetched_folder,
    files_in,
    of_file,
    of_folder,
)
from training.errors import UserError
from training.runs.files import home_expanded

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

# The name of the token between documents, as in GPT-2.
END_OF_BYTES = "<|endoftext|>"


class ByteTokenizer:
    """A tokenizer without a file: ids 0 to 255 are the bytes of UTF-8; id 256 separates documents."""

    vocab_size: ClassVar[int] = 257
    end_of_text_id: ClassVar[int] = 256
    stops: frozenset[int] = frozenset({256})
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = (256,)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Returns one uint8 array for each text. Code points without UTF-8 (lone surrogates) become `?`."""
        return [np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of these ids without separators; bytes that are not UTF-8 become U+FFFD."""
        return bytes(number for number in ids if number != self.end_of_text_id).decode("utf-8", errors="replace")

    def id_of(self, token: str) -> int | None:
        """Returns the id of the special token with the text `token`; None for every text but <|endoftext|>."""
        return self.end_of_text_id if token == END_OF_BYTES else None

    @property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens, by their text in `library_bytes`."""
        return library_bytes().get_vocab(with_added_tokens=True)

    @cached_property
    def pretrained(self) -> PreTrainedTokenizerFast:
        """A tokenizer of transformers with the same ids, without a chat template."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=library_bytes(), eos_token=END_OF_BYTES)


def library_bytes() -> tokenizers.Tokenizer:
    """Makes a tokenizer of the library tokenizers with the ids of ByteTokenizer.

    It is GPT-2's byte-level BPE without merges (Radford et al. 2019).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # In GPT-2 a byte that is a printable character stands for itself; the others are the characters from 256 on.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END_OF_BYTES, special=True)])
    return made


Tokenizer = ByteTokenizer | LibraryTokenizer


def load_tokenizer(given: str | Path | None, begin: str | None = AUTO, end: str | None = AUTO) -> Tokenizer:
    """Returns the tokenizer that dataset.tokenizer names.

    None names the tokenizer of bytes; other names are a JSON file of the library tokenizers, a model's folder, or
    OWNER/NAME or OWNER/NAME@REVISION on the Hub. `begin` and `end` are the tokens around each document. None: no token;
    auto: those that the tokenizer itself puts there, and if it puts none at the end, its end of text. Raises UserError
    if the tokenizer or one of the tokens does not exist.
    """
    tokenizer = _loaded(given)
    for name, token in (("begin", begin), ("end", end)):
        if token != AUTO:
            setattr(tokenizer, name, () if token is None else (_id_of(tokenizer, given, name, token),))
    tokenizer.stops |= set(tokenizer.end)
    return tokenizer


def folder_of_tokenizer(given: str | Path) -> Path:
    """Returns the file or folder that `dataset.tokenizer` names, downloaded if need be.

    Raises UserError if it does not exist, or the download fails.
    """
    path = home_expanded(KEY, given)
    if path.exists():
        return path
    if (hub := HubName.of(str(given))) is None:
        raise UserError(f"{KEY}={given}: no such file or folder: {ADVICE}")
    return fetched_folder(hub)


def _loaded(given: str | Path | None) -> Tokenizer:
    if given is None:
        return ByteTokenizer()
    path = folder_of_tokenizer(given)
    return of_folder(str(given), path) if path.is_dir() else of_file(str(given), path)


def _id_of(tokenizer: Tokenizer, given: str | Path | None, name: str, token: str) -> int:
    number = tokenizer.id_of(token)
    if number is None:
        raise UserError(
            f"dataset.{name}={token}: is no token of dataset.tokenizer={given or 'null'}: give the text of one, auto or"
            " null"
        )
    return number


def tokenizer_files(given: str | None, longest: int) -> dict[str, bytes]:
    """Returns the contents of the files of the tokenizer that `given` names, by file name.

    Files in the tokenizer's folder, or beside its tokenizer.json, such as a chat template, are returned as they are. A
    missing tokenizer_config.json is made, for sequences of `longest` tokens. None, the tokenizer of bytes, becomes a
    tokenizer of transformers with the same ids, in which <|endoftext|> is the token between documents. Raises UserError
    if a file cannot be read.
    """
    tokenizer = load_tokenizer(given)
    if given is None:
        files, end_of_text = {TOKENIZER_FILE: library_bytes().to_str().encode()}, END_OF_BYTES
    else:
        path = folder_of_tokenizer(given)
        of_folder = path.is_dir()
        files = {name: file.read_bytes() for name, file in files_in(path if of_folder else path.parent).items()}
        if not of_folder:
            files[TOKENIZER_FILE] = path.read_bytes()
        end_of_text = tokenizer.pretrained.convert_ids_to_tokens(tokenizer.end_of_text_id)
    if CONFIG_FILE not in files:
        values = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end_of_text,
            "model_max_length": longest,
            "clean_up_tokenization_spaces": False,
        }
        files[CONFIG_FILE] = json.dumps(values, indent=2).encode()
    return files
