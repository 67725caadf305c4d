"""Captions beside pictures and in metadata.jsonl, and what is refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from training.data.captioned.captions import captions_below
from training.errors import UserError

Write = Callable[[str, str | bytes], str]


def rows(*pairs: tuple[str, object]) -> str:
    return "".join(json.dumps({"file_name": name, "text": text}) + "\n" for name, text in pairs)


def test_files_beside_pictures_are_read_whole(tmp_path: Path, write: Write) -> None:
    write("a.txt", "\ufeffa red cat,\nsleeping \n")
    write("sub/b.caption", "ein Kätzchen")
    write("c.d.txt", "")
    write("notes.txt", "of no picture")
    assert captions_below(tmp_path, ["a.png", "sub/b.jpg", "c.d.webp"]) == ["a red cat,\nsleeping", "ein Kätzchen", ""]


def test_lines_end_alike_whichever_system_wrote_them(tmp_path: Path, write: Write) -> None:
    write("a.txt", b"a red cat,\r\nsleeping\r\n")
    assert captions_below(tmp_path, ["a.png"]) == ["a red cat,\nsleeping"]


def test_rows_name_pictures_from_their_own_folder(tmp_path: Path, write: Write) -> None:
    write("metadata.jsonl", rows(("a.png", " a\n"), ("./sub/b.png", "")) + "\n")
    write("other/metadata.jsonl", rows(("c.png", "c")))
    write("other/my_metadata.jsonl", "not read")
    write("d.txt", "d")
    assert captions_below(tmp_path, ["a.png", "d.png", "other/c.png", "sub/b.png"]) == ["a", "d", "c", ""]


def test_rows_are_those_of_hugging_faces_imagefolder(tmp_path: Path, write: Write) -> None:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    for name in ("b.png", "a.png", "c.png"):
        Image.new("RGB", (2, 2)).save(tmp_path / name)
    write("metadata.jsonl", rows(("c.png", "see"), ("a.png", "ay"), ("b.png", "")))
    theirs = datasets.load_dataset(
        "imagefolder", data_dir=str(tmp_path), split="train", streaming=True
    ).cast_column("image", datasets.Image(decode=False))  # fmt: skip
    expected = {Path(row["image"]["path"]).name: row["text"] for row in theirs}
    names = sorted(expected)
    assert captions_below(tmp_path, names) == [expected[name] for name in names]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"b.txt": "b"}, r".*: 2 of 3 pictures have no caption, the first is a\.png: write a\.txt \(an empty file"),
        ({"metadata.jsonl": rows(("b.png", "b"))}, r".*: 2 of 3 pictures have no caption, the first is a\.png"),
        ({"a.txt": "", "a.caption": ""}, r".*: a\.png has two captions, in a\.txt and in a\.caption: keep one$"),
        (
            {"a.txt": "", "metadata.jsonl": rows(("a.png", ""))},
            r".*: a\.png has two captions, in a\.txt and in metadata\.jsonl: keep one$",
        ),
        (
            {"metadata.jsonl": rows(("a.png", "1"), ("a.png", "2"))},
            r".*: a\.png has two captions, in metadata\.jsonl and in metadata\.jsonl: keep one$",
        ),
        (
            {"metadata.jsonl": rows(("a.png", ""), ("x.png", ""), ("../y.png", ""))},
            r".*metadata\.jsonl: 2 rows name no picture below .*, the first is x\.png: add the pictures",
        ),
        (
            {"metadata.jsonl": rows(("a.png", None))},
            r".*metadata\.jsonl, line 1: must have texts file_name and text; it has file_name, text$",
        ),
        (
            {"metadata.jsonl": '{"file_name": "a.png", "caption": "a"}'},
            r".*metadata\.jsonl, line 1: must have texts file_name and text; it has file_name, caption$",
        ),
        ({"metadata.jsonl": "{"}, r".*cannot read .*metadata\.jsonl: line 1 is not JSON"),
        ({"metadata.csv": "file_name,text"}, r".*: metadata\.csv is not read: write its rows to metadata\.jsonl"),
        (
            {"a.txt": "Kätzchen".encode("latin-1")},
            r"dataset: cannot read the caption .*a\.txt: it is not text in UTF-8",
        ),
    ],
)
def test_what_is_missing_twice_or_damaged_is_refused(
    tmp_path: Path, write: Write, files: dict[str, str | bytes], message: str
) -> None:
    for name, content in files.items():
        write(name, content)
    with pytest.raises(UserError, match=f"^{message}") as caught:
        captions_below(tmp_path, ["a.png", "b.png", "c.png"])
    assert "\n" not in str(caught.value)
