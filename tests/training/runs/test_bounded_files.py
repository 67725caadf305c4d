"""Files that another program may have written: one short reason, whatever they are."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.helpers.time_limit import time_limit
from tests.training.helpers.yaml_bomb import BOMB
from training.runs.bounded_files import (
    DamagedError,
    MissingError,
    json_object,
    parse_yaml,
    read_bytes,
    read_json,
    read_lines,
    read_yaml,
)

READERS = (read_bytes, lambda path: list(read_lines(path)), read_json, read_yaml)


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    with time_limit(20):
        yield


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "it is not a file"),
        (Path.mkdir, "it is not a file"),
        (lambda path: path.symlink_to(path), r"it cannot be read \(Too many levels"),
        (lambda path: None, "no such file"),
    ],
    ids=["pipe", "directory", "loop", "nothing"],
)
def test_only_regular_files_are_read(tmp_path: Path, read, make, reason: str):
    make(tmp_path / "x")
    with pytest.raises(DamagedError, match=f"^{tmp_path}/x: {reason}") as caught:
        read(tmp_path / "x")
    assert isinstance(caught.value, MissingError) == (reason == "no such file")


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"12345")
    assert read_bytes(tmp_path / "x", largest=5) == b"12345"
    assert read_bytes(Path("/proc/self/cmdline"))
    os.truncate(tmp_path / "x", 2**40)
    for read in (read_bytes, read_json, read_yaml):
        with pytest.raises(DamagedError, match=r"it has more than .* bytes, too many for this file"):
            read(tmp_path / "x")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is not JSON"),
        ("{", "it is not JSON"),
        ("[1]", "it is not a JSON object"),
        ("\udcff", "it is not JSON"),
        ('{"a": ' + "[" * 200_000, "it is not JSON"),
        ('{"a": -1' + "0" * 5000 + "}", "it is not JSON"),
    ],
)
def test_json_that_no_run_writes(text: str, reason: str):
    with pytest.raises(DamagedError, match=f"^x: {reason}$"):
        json_object(text.encode(errors="surrogateescape"), "x")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, "it has YAML aliases, which no configuration has"),
        ("? [a]\n: b", "it is not a plain YAML file"),
        ("a: [", "it is not a plain YAML file"),
        ("- a", "it is not a configuration"),
        (b"\xff\xfe: a", "it is not text in UTF-8"),
    ],
)
def test_yaml_that_no_run_writes(tmp_path: Path, text: str | bytes, reason: str):
    (tmp_path / "x.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DamagedError, match=f"^{tmp_path}/x.yaml: {reason}"):
        read_yaml(tmp_path / "x.yaml")


def test_every_value_in_yaml_is_text():
    text = f"a: 1\nb: [null, true, 2001-99-99, !!int '', 0x{'f' * 10_000}]\nc: !!python/object:os.x {{d: '%'}}\n"
    assert parse_yaml(text) == {"a": "1", "b": ["null", "true", "2001-99-99", "", "0x" + "f" * 10_000], "c": {"d": "%"}}
