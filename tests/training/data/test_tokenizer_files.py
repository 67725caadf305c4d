"""transformers reads the tokenizer's files, and gives the ids of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from training.data.tokenizer import load_tokenizer
from training.data.tokenizer_files import tokenizer_files
from training.errors import UserError

TEXT = "a Größe\n\t\x00 \U0001f600 <x>"


def read_back(folder: Path, files: dict[str, bytes]):
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate("abc")}, merges=[]))
    made.add_special_tokens(["</s>"])
    (tmp_path / "from").mkdir()
    made.save(str(tmp_path / "from" / "tokenizer.json"))
    return tmp_path / "from" / "tokenizer.json"


def test_bytes_have_the_same_ids(tmp_path: Path):
    found, own = read_back(tmp_path, tokenizer_files(None, longest=128)), load_tokenizer(None)
    assert found(TEXT).input_ids == list(own.encode_batch([TEXT])[0])
    assert found.decode(found(TEXT).input_ids) == TEXT
    assert (found.eos_token_id, len(found), found.model_max_length) == (own.end_of_text_id, own.vocab_size, 128)


def test_a_file_is_taken_as_it_is(tmp_path: Path, file: Path):
    found = read_back(tmp_path, tokenizer_files(str(file), longest=16))
    assert (tmp_path / "tokenizer.json").read_bytes() == file.read_bytes()
    assert found("cab").input_ids == [2, 0, 1]
    assert (found.eos_token, found.eos_token_id) == ("</s>", 3)


def test_so_are_the_files_beside_it(file: Path):
    beside = {"tokenizer_config.json": b'{"eos_token": "b"}', "chat_template.jinja": b"{{ x }}"}
    for name, content in {**beside, "model.safetensors": b"", "secret.txt": b"mine"}.items():
        (file.parent / name).write_bytes(content)
    files = tokenizer_files(str(file), longest=16)
    assert files == {**beside, "tokenizer.json": file.read_bytes()}
    assert json.loads(files["tokenizer_config.json"]) == {"eos_token": "b"}


def test_a_file_that_is_gone_is_one_line(tmp_path: Path):
    with pytest.raises(UserError, match=r"dataset\.tokenizer=.*none: no such file"):
        tokenizer_files(str(tmp_path / "none"), longest=16)
