"""Files of an exported model beside its weights: those that it came with, else what its run knows.

A model came with files of its own where its run began with weights, or has the tokenizer of its source. Its tokenizer,
its templates of chats and the ends of its texts are then as they were. A model from the seed has those of its run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from training.data.chats.templates import Template
from training.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_files
from training.data.tokenizer_folder import TEMPLATE_FILE, files_in
from training.weights.files import GENERATION_FILE, SMALL_FILES
from training.weights.origin import ends_of, origin_of, values_in

# Keys of config.json that say how a model is used, and not what it is.
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "use_cache")
# Those of a Llama of ours too, which has no other place for them.
KEPT_OF_LLAMA = (*KEPT, "max_position_embeddings")


@dataclass(frozen=True)
class Companions:
    """The files beside the weights and the configuration, and keys of config.json; of our Llama there are more."""

    files: dict[str, bytes]
    values: dict[str, Any]
    of_llama: dict[str, Any]


def companions(config: DictConfig) -> Companions:
    """Returns what the model of a run leaves with. Raises UserError if a file of it cannot be read."""
    origin = origin_of(config)
    files: dict[str, bytes] = {}
    tokenizer = None
    if origin is not None:
        files = {name: (origin / name).read_bytes() for name in SMALL_FILES if (origin / name).is_file()}
    if "tokenizer" in config.dataset:
        tokenizer = load_tokenizer(config.dataset.tokenizer)
        files |= tokenizer_files(config.dataset.tokenizer, config.seq_len)
        files |= _template(config, tokenizer)
    elif origin is not None:
        files |= {name: file.read_bytes() for name, file in files_in(origin).items()}
    came = values_in(origin)
    of_llama, values = ({key: came[key] for key in keys if key in came} for keys in (KEPT_OF_LLAMA, KEPT))
    if tokenizer is not None and not ends_of(origin):
        ends = _of_tokenizer(tokenizer)
        # A checkpoint has nulls.
        of_llama |= ends
        values |= ends
        files[GENERATION_FILE] = json.dumps(ends, indent=2).encode()
    return Companions(files, values, of_llama)


def _of_tokenizer(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Returns what a tokenizer says of the tokens around a text."""
    begin = tokenizer.begin[0] if len(tokenizer.begin) == 1 else None
    return {"bos_token_id": begin, "eos_token_id": tokenizer.end_of_text_id}


def _template(config: DictConfig, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Returns the file of the template that the run rendered chats with, unless it is the tokenizer's own."""
    if "template" not in config.dataset:
        return {}
    text = Template(tokenizer, config.dataset.template).text()
    return {} if text == tokenizer.pretrained.chat_template else {TEMPLATE_FILE: text.encode()}
