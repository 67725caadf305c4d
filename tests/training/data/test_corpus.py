"""Documents read from files on this machine, and the errors for files that cannot be read."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests import ROOT
from training.data.corpus import ROWS_PER_READ, find_files, read_files, read_stdlib, stdlib_files
from training.errors import UserError


def read(files: str | list[str], text_column: str = "text") -> list[str]:
    """Returns the documents of files, each joined from its pieces."""
    documents: list[str] = []
    pieces: list[str] = []
    for text, document_ends in read_files(find_files(files), text_column):
        pieces.append(text)
        if document_ends:
            documents.append("".join(pieces))
            pieces = []
    assert not pieces, "the last document has no end"
    return documents


def test_the_standard_library_is_listed_without_its_tests() -> None:
    names = [path.as_posix() for path in stdlib_files()]
    assert not any("/test/" in name or "site-packages" in name for name in names)
    assert any(name.endswith("/json/decoder.py") for name in names)


def test_source_files_that_are_not_utf8_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.py").write_bytes(b"# caf\xe9 is not UTF-8\n")
    (tmp_path / "c.py").write_text("second\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.py").write_text("first é\n")
    (tmp_path / "empty.py").touch()
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_text("a test\n")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert list(read_stdlib()) == [("first é\n", True), ("second\n", True)]


def test_stdlib_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(UserError, match=r"^dataset=stdlib: no sources under"):
        list(read_stdlib())


def test_every_format_gives_the_same_documents(write, tmp_path: Path) -> None:
    documents = ["one é\nline", "two\n", "three and more"]
    rows = [{"id": number, "body": text} for number, text in enumerate(documents)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    formats = {
        "txt": [write(f"{number}.txt", text) for number, text in enumerate(documents)],
        "jsonl": write("a.jsonl", "\n".join(map(json.dumps, rows))),
        "json": write("a.json", json.dumps(rows)),
        "parquet": str(tmp_path / "a.parquet"),
    }
    for files in formats.values():
        assert read(files, "body") == documents


def test_a_long_text_file_is_one_document_in_pieces(write) -> None:
    lines = "".join(f"line {number}\n" for number in range(3 * ROWS_PER_READ + 1))
    path = write("long.txt", lines)
    assert read(path) == [lines]
    pieces = [text for text, _ in read_files(find_files(path), "text")]
    assert max(text.count("\n") for text in pieces) == ROWS_PER_READ, "it was read whole"


def test_rows_without_text_and_empty_files_are_left_out(write) -> None:
    rows = ['{"text": "first"}', '{"text": null}', '{"other": 1}', '{"text": ""}', '{"text": "second"}']
    files = [write("a.jsonl", "\n".join(rows)), write("empty.jsonl", ""), write("empty.txt", "")]
    assert read(files) == ["first", "second"]


def test_a_name_that_looks_like_a_pattern_is_read(write) -> None:
    path = write(".hidden/a[1]*{x}.txt", "found all the same")
    assert read(path) == ["found all the same"]


def test_patterns_are_sorted_and_each_file_is_taken_once(write, tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/er/c.txt"):
        write(name, name)
    found = find_files([f"{tmp_path}/b.txt", f"{tmp_path}/**/*.txt"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["b.txt", "a.txt", "deep/er/c.txt"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("", r"dataset\.files is empty: give dataset\.files=PATH"),
        ([], r"dataset\.files is empty"),
        ("absent.txt", r"dataset\.files=absent\.txt: no such file \(looked from /"),
        ("absent/*.txt", r"dataset\.files=absent/\*\.txt matches no file"),
        (str(ROOT), r"dataset\.files=.* is a folder: name the files in it, as in '.*\*\*/\*\.txt'"),
        (__file__, r"dataset\.files=.*test_corpus\.py: cannot read '\.py' files; give \.txt, \.jsonl"),
    ],
)
def test_patterns_without_a_readable_file_are_refused(files: str | list[str], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        find_files(files)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"text": "good"}\n\n{"text": bad}\n',
            r"dataset\.files: cannot read .*a\.jsonl: line 3 is not JSON",
        ),
        ("a.json", '{"text": ', r"dataset\.files: cannot read .*a\.json: .*; repair or remove this file"),
        ("a.parquet", "no parquet", r"dataset\.files: cannot read .*a\.parquet: Parquet magic bytes not found"),
        ("a.txt", b"\xff\xfea", r"dataset\.files: cannot read .*a\.txt: 'utf-8' codec can't decode"),
        ("a.jsonl", '{"body": "x", "n": 1}', r"dataset\.text_column=text: no such column in .*; it has body, n"),
        ("a.jsonl", '{"text": 3}', r"dataset\.text_column=text: contains int, not text"),
        ("a.jsonl", '{"text": "word"}\n{"text": 3}', r"dataset\.text_column=text: contains int, not text"),
        ("a.jsonl", '{"text": "2020-01-01"}', r"dataset\.text_column=text: contains datetime, not text"),
    ],
)
def test_unreadable_content_is_refused_in_one_line(write, capfd, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}") as refusal:
        read(write(name, content))
    assert "\n" not in str(refusal.value)
    assert capfd.readouterr().err == ""


def test_a_parquet_file_without_the_column_is_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"^dataset\.text_column=text: no such column in .*; it has body, n$"):
        read(str(tmp_path / "a.parquet"))


def test_reading_leaves_nothing_in_the_cache_folder(write, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "datasets"
    pieces = read_files(find_files(write("a.txt", "text")), "text", folder)
    assert next(pieces) == ("text", False)
    assert folder.is_dir()
    assert list(pieces) == [("", True)]
    assert not folder.exists()
