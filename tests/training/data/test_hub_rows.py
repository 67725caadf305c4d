"""Rows of a local folder with the layout of a dataset on the Hub; `test_hub` reads from a stand-in for the Hub."""

from pathlib import Path

import pytest

from training.data.hub_rows import columns_of, open_rows
from training.errors import UserError


@pytest.fixture
def repository(tmp_path: Path) -> str:
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "train.jsonl").write_text('{"a": 1, "b": "x"}\n{"a": 2, "b": "y"}\n')
    return str(tmp_path / "repository")


def test_rows_and_columns(repository: str, tmp_path: Path) -> None:
    rows = open_rows(repository, None, "train", revision=None, folder=str(tmp_path), otherwise="")
    assert columns_of(rows) == ["a", "b"]
    assert [row["a"] for row in rows] == [1, 2]


def test_an_unknown_split_is_named_by_its_key(repository: str, tmp_path: Path) -> None:
    options = {"revision": None, "folder": str(tmp_path), "otherwise": ""}
    with pytest.raises(UserError, match=r"dataset\.name=.* dataset\.eval_split=dev: Bad split: dev") as refusal:
        open_rows(repository, None, "dev", split_key="eval_split", **options)
    assert "\n" not in str(refusal.value)
