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


def test_rows_are_those_of_the_file_whatever_format_it_was_saved_with(tmp_path: Path) -> None:
    saved = import_datasets().Dataset.from_dict({"a": [[1, 2]], "b": ["x"]}).with_format("torch", columns=["a"])
    saved.save_to_disk(tmp_path)
    rows = open_rows(str(tmp_path), None, "train", revision=None, folder=str(tmp_path), otherwise="")
    assert list(rows) == [{"a": [1, 2], "b": "x"}]


def test_keys_of_the_hub_are_refused_for_a_folder(tmp_path: Path) -> None:
    import_datasets().Dataset.from_dict({"a": [1]}).save_to_disk(tmp_path / "saved")
    given = {"folder": str(tmp_path), "otherwise": ""}
    with pytest.raises(UserError, match=r"^dataset\.revision=v2: has no effect on dataset\.name=/.*: leave it out$"):
        open_rows(str(tmp_path), None, "train", revision="v2", **given)
    with pytest.raises(UserError, match=r"^dataset\.config_name=en: has no effect on dataset\.name=/.*/saved, a local"):
        open_rows(str(tmp_path / "saved"), "en", "train", revision=None, **given)
