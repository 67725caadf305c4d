"""Rows of chats from every format, with values as they are written, and the errors for what cannot be read."""

import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from training.data.chats.reading import read_files, read_hub
from training.errors import UserError

# Arrow would give each call the arguments of both, and the first message a tool_calls of None.
ROWS = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"arguments": {"x": 1}}]}]},
    {"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "tool_calls": [{"arguments": {"y": "s"}}]}]},
]
NULL = [{"messages": [{"role": "assistant", "tool_calls": [{"arguments": {"unit": None}}]}]}, *ROWS]


def rows(path: str) -> list[dict]:
    return [row for _, row in read_files(path)]


def test_every_format_gives_the_rows_as_they_are_written(write, tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a[1].parquet")

    assert rows(write("a.jsonl", "\n".join(map(json.dumps, ROWS)))) == ROWS
    assert rows(write("list.json", json.dumps(ROWS))) == ROWS
    assert rows(write("lines.json", "\n".join(map(json.dumps, ROWS)))) == ROWS
    assert rows(write("one.json", json.dumps(ROWS[0]))) == ROWS[:1]
    assert rows(str(tmp_path / "a[1].parquet")) == ROWS


def test_none_stays_where_it_is_written(write, tmp_path: Path) -> None:
    typed = datasets.Dataset.from_list(NULL, on_mixed_types="use_json")
    typed.to_parquet(str(tmp_path / "typed.parquet"))

    assert rows(write("a.jsonl", "\n".join(map(json.dumps, NULL)))) == NULL
    assert rows(str(tmp_path / "typed.parquet")) == NULL


def test_a_folder_of_the_hubs_layout(write, tmp_path: Path) -> None:
    folder = Path(write("data/train.jsonl", "\n".join(map(json.dumps, NULL)))).parent

    read = list(read_hub(str(folder), None, "train", None, str(tmp_path / "cache")))

    assert [row for _, row in read] == NULL
    assert read[1][0] == f"dataset.name={folder} row 2"


def test_places_name_file_and_row(write, tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    lines = write("a.jsonl", "\n\n".join(map(json.dumps, ROWS)))
    items = write("a.json", json.dumps(ROWS))

    assert [place for place, _ in read_files([lines, items])] == [
        f"{lines} line 1",
        f"{lines} line 3",
        f"{items} item 1",
        f"{items} item 2",
    ]
    assert [place for place, _ in read_files(str(tmp_path / "a.parquet"))][1] == f"{tmp_path}/a.parquet row 2"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"messages": []}\n{"mess', "line 2 is not JSON"),
        ("a.jsonl", "[1]", "line 1 is not a JSON object"),
        ("a.json", "[1]", "item 1 is not a JSON object"),
        ("a.parquet", "hello", "repair or remove this file"),
    ],
)
def test_a_damaged_file_is_refused(write, name: str, content: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        rows(write(name, content))

    assert str(caught.value).startswith("dataset.files: cannot read ")


def test_other_files_are_refused(write) -> None:
    with pytest.raises(UserError, match=r"dataset.eval_files=.*cannot read '.txt' files; give .jsonl, .json, .parquet"):
        list(read_files(write("a.txt", "text"), "dataset.eval_files"))


def test_an_empty_file_has_no_rows(write) -> None:
    assert rows(write("a.jsonl", "")) == []
