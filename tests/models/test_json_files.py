"""JSON files of others: what is wrong with one is a line that names it, and no pipe is waited for."""

import json
import os
from pathlib import Path

import pytest
from transformers import BambaConfig

from models.hf_source import find_source
from models.json_files import read_object


def test_an_object_is_read(tmp_path: Path):
    file = tmp_path / "a.json"
    file.write_text('{"a": [1, {"b": null}]}')
    assert read_object(file, "look elsewhere") == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not JSON"),
        (b"[]", "is not a map"),
        (b" " * 101, "has 101 bytes, too many for a map"),
    ],
    ids=["cut short", "no text", "nested", "digits", "a list", "large"],
)
def test_anything_else_is_refused_in_one_line(tmp_path: Path, content: bytes, problem: str):
    file = tmp_path / "a.json"
    file.write_bytes(content)
    largest = 100 if "too many" in problem else 2**20
    with pytest.raises(ValueError, match=rf"^{file} {problem}: look elsewhere$"):
        read_object(file, "look elsewhere", "a map", largest)


def test_what_is_no_file_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot be read \(No such file or directory\): look elsewhere$"):
        read_object(tmp_path / "a.json", "look elsewhere")
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path, tmp_path / "pipe.json"):
        with pytest.raises(ValueError, match=rf"^{path} is not a file: look elsewhere$"):
            read_object(path, "look elsewhere")


def test_transformers_writes_infinity_as_an_object(tmp_path: Path):
    config = BambaConfig(time_step_limit=(0.0, float("inf")))
    config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert read_object(tmp_path / "config.json", "look elsewhere")["time_step_limit"] == [0.0, float("inf")]
    assert find_source(str(tmp_path), "causal_lm").config().time_step_limit == config.time_step_limit


@pytest.mark.parametrize("value", ["null", "[1]"])
def test_an_object_that_names_no_number_stays_one(tmp_path: Path, value: str):
    (tmp_path / "a.json").write_text(f'{{"a": {{"__float__": {value}}}, "b": {{"__float__": "NaN", "c": 1}}}}')
    found = read_object(tmp_path / "a.json", "look elsewhere")
    assert found == {"a": {"__float__": json.loads(value)}, "b": {"__float__": "NaN", "c": 1}}
