"""The files of a run's tokenizer, for transformers' `AutoTokenizer.from_pretrained`."""

from __future__ import annotations

import json

from training.data.tokenizer import ByteTokenizer, load_tokenizer
from training.runs.paths import home_expanded

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
# What published models have beside tokenizer.json.
BESIDE = (
    CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
# The tokens of bytes have one end of text, under GPT-2's name.
END_OF_BYTES = "<|endoftext|>"


def tokenizer_files(path: str | None, longest: int) -> dict[str, bytes]:
    """Returns the files of the tokenizer at `path`, or of that of bytes for None, by name.

    Those that are beside a tokenizer.json, such as a template of chats, are taken too. A tokenizer_config.json that is
    not there is made. The tokenizer of bytes becomes one of transformers with the same ids (the alphabet of GPT-2's
    bytes, Radford et al. 2019), in which <|endoftext|> is the token between documents.

    Args:
        longest: tokens of a sequence, as tokenizer_config.json tells.

    Raises UserError if the tokenizer cannot be read.
    """
    tokenizer = load_tokenizer(path)
    if isinstance(tokenizer, ByteTokenizer):
        files, end_of_text = {TOKENIZER_FILE: _of_bytes(tokenizer)}, END_OF_BYTES
    else:
        file = home_expanded("dataset.tokenizer", path)
        files = {TOKENIZER_FILE: file.read_bytes()}
        files |= {name: (file.parent / name).read_bytes() for name in BESIDE if (file.parent / name).is_file()}
        end_of_text = _name_of(tokenizer.end_of_text_id, files[TOKENIZER_FILE])
    if CONFIG_FILE not in files:
        values = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end_of_text,
            "model_max_length": longest,
            "clean_up_tokenization_spaces": False,
        }
        files[CONFIG_FILE] = json.dumps(values, indent=2).encode()
    return files


def _of_bytes(tokenizer: ByteTokenizer) -> bytes:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # Each byte is the printable character that stands for it; those that are none follow the others.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END_OF_BYTES, special=True)])
    if made.token_to_id(END_OF_BYTES) != tokenizer.end_of_text_id:
        raise AssertionError("the tokenizer of bytes has another id for the end of text")
    return made.to_str().encode()


def _name_of(token: int, content: bytes) -> str:
    """Returns the name of a token in a tokenizer.json."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(content.decode()).id_to_token(token)
