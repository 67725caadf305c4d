"""The tokenizer of bytes: the default of models from the seed, and its form in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

# The token between documents, under GPT-2's name.
END_OF_BYTES = "<|endoftext|>"


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; 256 separates documents."""

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
        """Returns the id of a token that is written so, None if there is none: all but the end of text are bytes."""
        return self.end_of_text_id if token == END_OF_BYTES else None

    @property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens, by their text in `library_bytes`."""
        return library_bytes().get_vocab(with_added_tokens=True)

    @cached_property
    def pretrained(self) -> PreTrainedTokenizerFast:
        """One of transformers with the same ids, without a template of chats."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=library_bytes(), eos_token=END_OF_BYTES)


def library_bytes() -> Tokenizer:
    """Makes the tokenizer of bytes as one of the library tokenizers: the alphabet of GPT-2's bytes, without merges.

    Radford et al. 2019.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # Each byte is the printable character that stands for it; those that are none follow the others.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END_OF_BYTES, special=True)])
    return made
