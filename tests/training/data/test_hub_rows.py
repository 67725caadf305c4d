"""Rows of a local folder with the layout of a dataset on the Hub; `test_hub` reads from a stand-in for the Hub."""

from pathlib import Path

import pytest

from training.data.hub_rows import columns_of, open_rows
from training.data.local_files import import_datasets
from training.errors import UserError


def test_rows_and_columns(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "train.jsonl").write_text('{"a": 1, "b": "x"}\n{"a": 2, "b": "y"}\n')
    rows = open_rows(str(tmp_path / "repository"), None, "train", revision=None, folder=str(tmp_path), otherwise="")
    assert columns_of(rows) == ["a", "b"]
    assert [row["a"] for row in rows] == [1, 2]


def test_a_folder_of_save_to_disk_has_no_splits(tmp_path: Path) -> None:
    import_datasets().Dataset.from_dict({"a": [1, 2], "b": ["x", "y"]}).save_to_disk(tmp_path / "saved")
    given = {"revision": None, "folder": str(tmp_path), "otherwise": ""}
    rows = open_rows(str(tmp_path / "saved"), None, "train", **given)
    assert columns_of(rows) == ["a", "b"]
    assert [row["b"] for row in rows.shuffle(seed=0, buffer_size=2)] in (["x", "y"], ["y", "x"])
    with pytest.raises(UserError, match=r"dataset\.eval_split=test: it was saved without splits: give train$"):
        open_rows(str(tmp_path / "saved"), None, "test", split_key="eval_split", **given)
