"""The files of a run's tokenizer, for transformers' `AutoTokenizer.from_pretrained`."""

from __future__ import annotations

import json

from training.data.byte_tokenizer import END_OF_BYTES, library_bytes
from training.data.tokenizer import folder_of_tokenizer, load_tokenizer
from training.data.tokenizer_folder import CONFIG_FILE, TOKENIZER_FILE, files_in


def tokenizer_files(given: str | None, longest: int) -> dict[str, bytes]:
    """Returns the files of the tokenizer that `given` names, or of that of bytes for None, by name.

    Those of a folder, and those beside a tokenizer.json, such as a template of chats, are taken as they are. A
    tokenizer_config.json that is not there is made. The tokenizer of bytes becomes one of transformers with the same
    ids, in which <|endoftext|> is the token between documents.

    Args:
        longest: tokens of a sequence, as tokenizer_config.json tells.

    Raises UserError if the tokenizer cannot be read.
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
