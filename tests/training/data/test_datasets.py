import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, models

from tests import ROOT
from training.data import packing
from training.data.corpus import ROWS_PER_READ, find_files, stdlib_files
from training.data.datasets import StdlibText, SyntheticTokens, TextFiles
from training.errors import UserError

SIZES = {"seed": 0, "seq_len": 8, "batch_size": 2}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], str]:
    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def test_stdlib_is_python_source_without_tests() -> None:
    dataset = StdlibText(seed=0, seq_len=512, batch_size=4)
    text = bytes(dataset._tokens[dataset._tokens != 256].astype(np.uint8)).decode()
    assert "import " in text
    assert dataset.vocab_size == 257
    assert dataset.num_blocks * 512 > 5_000_000
    names = [path.as_posix() for path in stdlib_files()]
    assert not any("/test/" in name or "site-packages" in name for name in names)
    assert any(name.endswith("/json/decoder.py") for name in names)


def test_stdlib_leaves_out_what_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.py").write_bytes(b"# caf\xe9 is not UTF-8\n")
    (tmp_path / "c.py").write_text("second\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.py").write_text("first é\n")
    (tmp_path / "empty.py").touch()
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_text("a test\n")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    dataset = StdlibText(seed=0, seq_len=3, batch_size=1)
    assert dataset._tokens.tolist() == [*"first é\n".encode(), 256, *b"second\n", 256]


def test_stdlib_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(UserError, match=r"^dataset=stdlib: no sources under"):
        StdlibText(**SIZES)


def test_max_tokens_cuts_the_corpus() -> None:
    assert StdlibText(**SIZES, max_tokens=801).num_blocks == 100


def test_every_format_gives_the_same_tokens(write, tmp_path: Path) -> None:
    documents = ["one é\nline", "two\n", "three and more"]
    rows = [{"id": number, "body": text} for number, text in enumerate(documents)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    formats = {
        "txt": [write(f"{number}.txt", text) for number, text in enumerate(documents)],
        "jsonl": write("a.jsonl", "\n".join(map(json.dumps, rows))),
        "json": write("a.json", json.dumps(rows)),
        "parquet": str(tmp_path / "a.parquet"),
    }
    expected = [token for text in documents for token in [*text.encode(), 256]]
    for files in formats.values():
        assert TextFiles(files, **SIZES, text_column="body")._tokens.tolist() == expected


def test_a_long_text_file_is_one_document(write) -> None:
    lines = "".join(f"line {number}\n" for number in range(3 * ROWS_PER_READ + 1))
    assert TextFiles(write("long.txt", lines), **SIZES)._tokens.tolist() == [*lines.encode(), 256]


def test_rows_without_text_and_empty_files_are_left_out(write) -> None:
    rows = ['{"text": "first"}', '{"text": null}', '{"other": 1}', '{"text": ""}', '{"text": "second"}']
    files = [write("a.jsonl", "\n".join(rows)), write("empty.jsonl", ""), write("empty.txt", "")]
    assert TextFiles(files, **SIZES)._tokens.tolist() == [*b"first", 256, *b"second", 256]


def test_a_name_that_looks_like_a_pattern_is_read(write) -> None:
    path = write(".hidden/a[1]*{x}.txt", "found all the same")
    assert TextFiles(path, **SIZES)._tokens.tolist() == [*b"found all the same", 256]


def test_patterns_are_sorted_and_each_file_is_taken_once(write, tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/er/c.txt"):
        write(name, name)
    found = find_files([f"{tmp_path}/b.txt", f"{tmp_path}/**/*.txt"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["b.txt", "a.txt", "deep/er/c.txt"]


def test_max_tokens_stops_reading(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "CHARACTERS_PER_CALL", 60)
    files = [write("good.txt", "x" * 100), write("bad.jsonl", "never read")]
    assert TextFiles(files, **SIZES, max_tokens=50).num_blocks == 6


def test_a_tokenizer_file_gives_the_ids(write, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "</s>": 70_000}, unk_token="x"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = [write(f"{number}.txt", "x") for number in range(8)]
    dataset = TextFiles(files, **SIZES, tokenizer=str(tmp_path / "tokenizer.json"))
    assert dataset._tokens.tolist() == [0, 70_000] * 8
    assert dataset.vocab_size == 70_001


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("", r"dataset\.files is empty: give dataset\.files=PATH"),
        ([], r"dataset\.files is empty"),
        ("absent.txt", r"dataset\.files=absent\.txt: no such file \(looked from /"),
        ("absent/*.txt", r"dataset\.files=absent/\*\.txt matches no file"),
        (str(ROOT), r"dataset\.files=.* is a folder: name the files in it, as in '.*\*\*/\*\.txt'"),
        (__file__, r"dataset\.files=.*test_datasets\.py: cannot read '\.py' files; give \.txt, \.jsonl"),
    ],
)
def test_files_that_cannot_be_meant_are_refused(files: str | list[str], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        TextFiles(files, **SIZES)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"text": "good"}\n\n{"text": bad}\n',
            r"dataset\.files: cannot read .*a\.jsonl: line 3 is not JSON",
        ),
        ("a.json", '{"text": ', r"dataset\.files: cannot read .*a\.json: .*; mend or leave out this file"),
        ("a.parquet", "no parquet", r"dataset\.files: cannot read .*a\.parquet: Parquet magic bytes not found"),
        ("a.txt", b"\xff\xfea", r"dataset\.files: cannot read .*a\.txt: 'utf-8' codec can't decode"),
        ("a.jsonl", '{"body": "x", "n": 1}', r"dataset\.text_column=text: no such column in .*; it has body, n"),
        ("a.jsonl", '{"text": 3}', r"dataset\.text_column=text: holds int, not text"),
        ("a.jsonl", '{"text": "word"}\n{"text": 3}', r"dataset\.text_column=text: holds int, not text"),
        ("a.jsonl", '{"text": "2020-01-01"}', r"dataset\.text_column=text: holds datetime, not text"),
        ("a.txt", "few", r"dataset: 4 tokens are less than one block of seq_len \+ 1 = 9; give more text"),
    ],
)
def test_content_that_cannot_be_used_is_refused(write, capfd, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}") as refusal:
        TextFiles(write(name, content), **SIZES)
    assert "\n" not in str(refusal.value)
    assert capfd.readouterr().err == ""


def test_a_parquet_file_without_the_column_is_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"^dataset\.text_column=text: no such column in .*; it has body, n$"):
        TextFiles(str(tmp_path / "a.parquet"), **SIZES)


def test_synthetic_batches_are_new_random_tokens() -> None:
    dataset = SyntheticTokens(vocab_size=50, seed=0, seq_len=99, batch_size=100)
    first, second = dataset.batch(0), dataset.batch(1)
    assert first.shape == (100, 100)
    assert first.dtype == torch.int64
    counts = torch.bincount(torch.cat([first, second]).flatten(), minlength=50)
    assert len(counts) == 50
    assert (counts - 400).abs().max() < 5 * 20  # five standard deviations of a uniform draw
    assert not torch.equal(first, second)
    assert torch.equal(first, dataset.batch(0))
    with pytest.raises(UserError, match=r"dataset\.vocab_size=0: must be at least 1"):
        SyntheticTokens(vocab_size=0, **SIZES)


DIGESTS = """
import hashlib, sys
import torch
from training.data.datasets import StdlibText, SyntheticTokens, TextFiles

def digests(corpus, tokenizer, order, **options):
    sizes = {"seed": 3, "seq_len": 16, "batch_size": 4} | options
    datasets = [
        StdlibText(**sizes, max_tokens=100_000),
        TextFiles(corpus, **sizes),
        TextFiles(corpus, **sizes, tokenizer=tokenizer),
        SyntheticTokens(vocab_size=1000, **sizes),
    ]
    found = {(i, j): datasets[i].batch(j).numpy().tobytes() for i in range(4) for j in order}
    return [hashlib.sha256(found[key]).hexdigest() for key in sorted(found)]
"""


@pytest.fixture
def corpus(write, tmp_path: Path) -> tuple[str, str]:
    """A pattern for some text files, and a tokenizer that is slow enough to use its threads."""
    for number in range(20):
        write(f"texts/{number}.txt", "".join(f"number {number * line}\n" for line in range(50)))
    tokenizer = Tokenizer(models.BPE({chr(code): code for code in range(128)} | {"nu": 128, "</s>": 129}, [("n", "u")]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "texts" / "*.txt"), str(tmp_path / "tokenizer.json")


def run_python(program: str, folder: Path, **environment: str) -> str:
    """Runs `program` in `folder`, with a home and a temporary folder of its own below it."""
    (folder / "home").mkdir()
    (folder / "tmp").mkdir()
    (folder / "here").mkdir()
    own = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_", "PYTHON"))}
    completed = subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, **own, **environment},
        cwd=folder / "here",
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_batches_are_the_same_in_another_process_and_nothing_is_left_behind(
    corpus: tuple[str, str], tmp_path: Path
) -> None:
    scope: dict = {}
    exec(DIGESTS, scope)
    expected = scope["digests"](*corpus, range(5))

    folder = tmp_path / "other"
    folder.mkdir()
    call = f"print(digests(*{corpus!r}, [4, 2, 0, 3, 1], cache_dir={str(folder / 'run' / 'datasets')!r}))"
    one_thread = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    printed = run_python(DIGESTS + call, folder, PYTHONHASHSEED="12345", LC_ALL="C", **one_thread)
    assert printed.strip() == str(expected)
    assert [path for path in folder.rglob("*") if not path.is_dir()] == []
    assert sorted(path.name for path in folder.rglob("*")) == ["here", "home", "run", "tmp"]
