"""Two tokenizers: one for bytes, and one for any Hugging Face `tokenizers` JSON file.

Both have `vocab_size` (the rows that a model's embedding needs), `end_of_text_id` (which separates documents) and
`encode_batch(texts)`, which returns one numpy array for each text and adds no special tokens.
"""

from pathlib import Path

import numpy as np

from training.errors import UserError, first_line
from training.runs.paths import home_expanded

# In this order: Llama 3; GPT-2 and Qwen; Llama 2 and Mistral; Gemma; DeepSeek; two that are common elsewhere.
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
    """Ids 0 to 255 are the bytes of UTF-8; 256 separates documents."""

    vocab_size = 257
    end_of_text_id = 256

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Returns one uint8 array for each text. Code points without UTF-8 (lone surrogates) become `?`."""
        return [np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8) for text in texts]


class FileTokenizer:
    """The tokenizer in a Hugging Face `tokenizers` JSON file (`tokenizer.json` in a model's folder).

    Args:
        path: the file.

    Raises:
        UserError: the file is missing, is not a tokenizer, or has none of END_OF_TEXT_NAMES.
    """

    def __init__(self, path: str | Path):
        from tokenizers import Tokenizer

        path = home_expanded("dataset.tokenizer", path)
        if not path.is_file():
            raise UserError(f"dataset.tokenizer={path}: no such file; give a tokenizer.json, or null for bytes")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself when it cannot parse the file
            raise UserError(
                f"dataset.tokenizer={path}: not a Hugging Face tokenizers JSON file ({first_line(error)}); "
                "give a tokenizer.json, or null for bytes"
            ) from error
        # The file may cut or pad inputs to a model's window, which would drop text or add padding here.
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
        # Ids may have gaps, so the largest id can be above the number of tokens.
        self.vocab_size: int = max(ids.values()) + 1

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Returns one uint32 array for each text. It tokenises in threads; their number does not change the result."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(path: str | Path | None) -> Tokenizer:
    """Returns the byte tokenizer for None, else the tokenizer in the JSON file at `path`."""
    return ByteTokenizer() if path is None else FileTokenizer(path)
