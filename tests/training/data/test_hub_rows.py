"""Rows of a local folder with the layout of a dataset on the Hub; `test_hub` reads from a stand-in for the Hub."""

from pathlib import Path

from training.data.hub_rows import columns_of, open_rows


def test_rows_and_columns(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "train.jsonl").write_text('{"a": 1, "b": "x"}\n{"a": 2, "b": "y"}\n')
    rows = open_rows(str(tmp_path / "repository"), None, "train", revision=None, folder=str(tmp_path), otherwise="")
    assert columns_of(rows) == ["a", "b"]
    assert [row["a"] for row in rows] == [1, 2]
