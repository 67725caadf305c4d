"""Tokenizers: bytes, built in, or any Hugging Face `tokenizers` JSON file.

Both kinds have `vocab_size` (the number of ids a model needs rows for), `end_of_text_id` (the separator of documents)
and `encode_batch(texts) -> list of numpy arrays`, one a text, without any special tokens added.
"""

from pathlib import Path

import numpy as np

from training.errors import UserError, first_line
from training.runs.paths import home_expanded

# Llama 3, GPT-2 and Qwen, Llama 2 and Mistral, Gemma, DeepSeek, and two common home-made ones.
END_OF_TEXT_NAMES = (
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|eos|>",
    "[EOS]",
)


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 between documents."""

    vocab_size = 257
    end_of_text_id = 256

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One uint8 array a text; code points that UTF-8 cannot hold (lone surrogates) become `?`."""
        return [np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8) for text in texts]


class FileTokenizer:
    """A Hugging Face `tokenizers` JSON file (`tokenizer.json` in a model's folder).

    Args:
        path: the file.

    Raises:
        UserError: the file is missing, is not a tokenizer, or names no end-of-text token.
    """

    def __init__(self, path: str | Path):
        from tokenizers import Tokenizer

        path = home_expanded("dataset.tokenizer", path)
        if not path.is_file():
            raise UserError(f"dataset.tokenizer={path}: no such file; give a tokenizer.json, or null for bytes")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for whatever it cannot parse
            raise UserError(
                f"dataset.tokenizer={path}: not a Hugging Face tokenizers JSON file ({first_line(error)})"
            ) from error
        # The file may ask for inputs cut or padded to a model's window, which would drop text or add padding here.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        end_of_text = next((ids[name] for name in END_OF_TEXT_NAMES if name in ids), None)
        if end_of_text is None:
            raise UserError(
                f"dataset.tokenizer={path}: has no end-of-text token (looked for {' '.join(END_OF_TEXT_NAMES)}); "
                "add one of them to its added_tokens"
            )
        self.end_of_text_id: int = end_of_text
        # Ids may have gaps, so the number of tokens can be below the largest id.
        self.vocab_size: int = max(ids.values()) + 1

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One uint32 array a text. Texts are tokenised in parallel; the result does not depend on the thread count."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(path: str | Path | None) -> Tokenizer:
    """The byte tokenizer for None, else the tokenizer in the JSON file at `path`."""
    return ByteTokenizer() if path is None else FileTokenizer(path)
