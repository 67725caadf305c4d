"""Documents read from files on this machine, in bounded memory, and the errors for files that cannot be read."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests import ROOT
from training.data import local_files
from training.data.local_files import PIECE_CHARACTERS, find_files, read_files, read_stdlib, stdlib_files
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
    lines = "".join(f"line {number}\n" for number in range(PIECE_CHARACTERS // 3))
    path = write("long.txt", lines)
    assert read(path) == [lines]
    pieces = [text for text, _ in read_files(find_files(path), "text")]
    assert max(map(len, pieces)) == PIECE_CHARACTERS, "it was read whole"


def test_the_mark_of_an_encoding_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\N{BYTE ORDER MARK}one", encoding="utf-8")
    assert read(str(tmp_path / "a.txt")) == ["one"]


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
        (__file__, r"dataset\.files=.*test_local_files\.py: cannot read '\.py' files; give \.txt, \.jsonl"),
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
        ("a.json", '{"body": ["x"], "n": [1]}', r"dataset\.text_column=text: no such column in .*; it has body, n"),
        ("a.jsonl", '{"text": 3}', r"dataset\.text_column=text: contains int, not text"),
        ("a.jsonl", '{"text": ["a"]}', r"dataset\.text_column=text: contains list, not text"),
        ("a.jsonl", '"text"', r"dataset\.files: cannot read .*a\.jsonl: line 1 is not a JSON object"),
        ("a.jsonl", '{"text": "a"}\n' + "[" * 100_000, r"dataset\.files: cannot read .*: line 2 is nested too deeply"),
        ("a.jsonl", b'{"text": "\xff"}', r"dataset\.files: cannot read .*a\.jsonl: 'utf-8' codec can't decode"),
        ("a.json", "[" * 100_000, r"dataset\.files: cannot read .*a\.json: the file is nested too deeply"),
        ("a.json", "3", r"dataset\.files: cannot read .*a\.json: the file is neither a list of objects"),
    ],
)
def test_unreadable_content_is_refused_in_one_line(write, capfd, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}") as refusal:
        read(write(name, content))
    assert "\n" not in str(refusal.value)
    assert capfd.readouterr().err == ""


def test_a_json_file_may_have_columns_or_an_object_a_line(write) -> None:
    assert read(write("a.json", '{"text": ["one", "two"], "n": [1, 2]}')) == ["one", "two"]
    assert read(write("b.json", '{"text": "one"}\n{"text": "two"}\n')) == ["one", "two"]


def test_a_byte_order_mark_is_no_text(write) -> None:
    assert read(write("a.jsonl", b'\xef\xbb\xbf{"text": "one"}')) == ["one"]
    assert read(write("a.json", b'\xef\xbb\xbf[{"text": "one"}]')) == ["one"]


def test_a_dictionary_column_is_read_and_another_refused(tmp_path: Path) -> None:
    column = pyarrow.array(["a", None, "b", "a"]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert read(str(tmp_path / "a.parquet")) == ["a", "b", "a"]
    with pytest.raises(UserError, match=r"^dataset\.text_column=body: no such column in .*; it has text$"):
        read(str(tmp_path / "a.parquet"), "body")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.txt"])
def test_a_long_document_comes_in_pieces(name: str, write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "PIECE_CHARACTERS", 10)
    document = "aé\u4e2d\U0001f600 " * 20
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": [document, "short"]}), tmp_path / name)
    elif name == "a.txt":
        write(name, document)
    else:
        rows = [{"text": document}, {"text": "short"}]
        write(name, json.dumps(rows) if name == "a.json" else "\n".join(map(json.dumps, rows)))
    assert read(str(tmp_path / name)) == ([document] if name == "a.txt" else [document, "short"])
    pieces = [text for text, _ in read_files(find_files(str(tmp_path / name)), "text")]
    assert max(map(len, pieces)) <= 10


def test_a_line_that_is_too_long_is_refused(write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("a.jsonl", '{"text": "a"}\n{"text": "%s"}' % ("b" * 2_000_000))
    monkeypatch.setattr(local_files, "LONGEST_JSON_BYTES", 1 << 20)
    with pytest.raises(UserError, match="line 2 is longer than 1 MiB"):
        read(path)
    with pytest.raises(UserError, match="more than 1 MiB is read whole"):
        read(write("a.json", json.dumps([{"text": "b" * 2_000_000}])))


READ = """
import resource, sys
import pyarrow.parquet
from training.data.local_files import find_files, read_files

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
characters = sum(len(text) for text, _ in read_files(find_files(sys.argv[1]), "text"))
print(characters, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.txt"])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the peak of a process in KiB")
@pytest.mark.slow
def test_memory_is_three_times_the_longest_value(name: str, write, tmp_path: Path) -> None:
    nbytes = 100 << 20
    text = "a" * nbytes
    if name == "a.parquet":
        table = pyarrow.table({"text": pyarrow.array([text, "b"])})
        pyarrow.parquet.write_table(table, tmp_path / name, compression="zstd", use_dictionary=False)
        assert (tmp_path / name).stat().st_size < 1 << 20
    else:
        write(name, text if name == "a.txt" else json.dumps({"text": text}))
    result = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / name)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    characters, peak = map(int, result.stdout.split())
    assert characters >= nbytes
    assert peak < (0.5 if name == "a.txt" else 3.2) * nbytes, peak / nbytes


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


def test_a_source_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A link to a file that is gone.
    (tmp_path / "a.py").symlink_to(tmp_path / "gone")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(UserError, match=r"^dataset=stdlib: .*a\.py cannot be read \(No such file"):
        list(read_stdlib())


def test_reading_imports_no_library() -> None:
    program = "import sys; from training.data.local_files import read_stdlib; next(read_stdlib()); print(*sys.modules)"
    command = [sys.executable, "-c", program]
    imported = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout.split()
    assert not {"datasets", "pandas", "pyarrow"} & set(imported)
