"""Two tokenizers: one for bytes, and one for any Hugging Face `tokenizers` JSON file.

Both have `vocab_size` (the rows that a model's embedding needs), `end_of_text_id` (which separates documents),
`encode_batch(texts)`, which returns one numpy array for each text and adds no special tokens, and `decode(ids)`.
"""

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from training.errors import UserError, first_line
from training.runs.paths import home_expanded

logger = logging.getLogger(__name__)

# Letters, signs and spaces of many scripts: a damaged table of a normalizer fails on some of them.
SAMPLE = "The quick\tbrown fox\n1,234.5 e\u0301\u00e9 \ufb01 \u2167 \u3000\u4e2d \uac00 \u0416 \u0627 \u0905 \U0001f600"
# Encodes the second argument by the tokenizer of the first.
PROBE = (
    "import sys; from tokenizers import Tokenizer; "
    "Tokenizer.from_file(sys.argv[1]).encode(sys.argv[2], add_special_tokens=False)"
)
PROBE_TIMEOUT_S = 300
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

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of these ids without separators; bytes that are not UTF-8 become U+FFFD."""
        return bytes(number for number in ids if number != self.end_of_text_id).decode("utf-8", errors="replace")


class FileTokenizer:
    """The tokenizer in a Hugging Face `tokenizers` JSON file (`tokenizer.json` in a model's folder).

    Args:
        path: the file.

    Raises:
        UserError: the file is missing, is not a tokenizer, or has none of END_OF_TEXT_NAMES. Later, a text cannot be
            encoded.

    BPE dropout is switched off, with a warning: random tokens would make batches differ from process to process.
    """

    def __init__(self, path: str | Path):
        from tokenizers import Tokenizer

        path = home_expanded("dataset.tokenizer", path)
        if not path.is_file():
            raise UserError(f"dataset.tokenizer={path}: no such file; give a tokenizer.json, or null for bytes")
        self._path = path
        self._check_in_a_process()
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises Exception itself, and its panics are no Exception
            raise self._refused(error, "not a Hugging Face tokenizers JSON file") from error
        model = self._tokenizer.model
        if getattr(model, "dropout", None):
            logger.warning(
                "dataset.tokenizer=%s: its BPE dropout of %s is off here, so that a text has the same tokens each time",
                path,
                model.dropout,
            )
            model.dropout = None
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
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise self._refused(error, "cannot encode the text") from error
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of these ids without special tokens; bytes that are not UTF-8 become U+FFFD."""
        try:
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise self._refused(error, "cannot decode the tokens") from error

    def _check_in_a_process(self) -> None:
        """Raises UserError for a file that ends a process, as some damaged tables of normalizers (charsmaps) do."""
        if b'"precompiled_charsmap"' not in self._path.read_bytes():
            return
        probe = [sys.executable, "-c", PROBE, str(self._path), SAMPLE]
        try:
            result = subprocess.run(probe, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            problem = f"to encode a line of text takes more than {PROBE_TIMEOUT_S} s"
        else:
            if result.returncode == 0:
                return
            problem = "its precompiled_charsmap is damaged"
        raise UserError(f"dataset.tokenizer={self._path}: {problem}; download the file again, or take null for bytes")

    def _refused(self, error: BaseException, what: str) -> UserError:
        advice = "give a tokenizer.json that fits, or null for bytes"
        return UserError(f"dataset.tokenizer={self._path}: {what} ({first_line(error)}); {advice}")


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(path: str | Path | None) -> Tokenizer:
    """Returns the byte tokenizer for None, else the tokenizer in the JSON file at `path`."""
    return ByteTokenizer() if path is None else FileTokenizer(path)
