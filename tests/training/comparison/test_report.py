"""Reports: what a comparison writes, of directories with strange content too: each is one row that says why."""

import csv
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.helpers.time_limit import time_limit
from training.comparison.report import compare
from training.comparison.rows import Row

DESCRIPTIONS = ("config.yaml", "choices.yaml", "hardware.json", "plan.json")
RESULTS = ("summary.json", "metrics.jsonl")


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    with time_limit(60):
        yield


STRANGE = {
    "a pipe": (os.mkfifo, "it is not a file"),
    "no text": (lambda path: path.write_bytes(b'{"a": \xff\n'), "it is not"),
}


def compared(write_run, folder: Path) -> tuple[list[Row], str]:
    """Compares the runs, of which the first two are good, and checks the rows of these; returns the others."""
    rows = compare([write_run.folder], folder)
    good, others = rows[:2], rows[2:]
    assert [(row.name.split()[0], row.status, row.curve, row.reasons) for row in good] == [
        ("none", "ok", "reference", []),
        ("layer_stream", "ok", "equal", []),
    ]
    return others, (folder / "compare.csv").read_text()


@pytest.fixture
def two_runs(write_run) -> None:
    write_run("none")
    write_run("layer_stream")


@pytest.mark.usefixtures("two_runs")
@pytest.mark.parametrize("file", [*DESCRIPTIONS, *RESULTS])
def test_a_strange_file_is_one_row_that_says_why(write_run, tmp_path: Path, capsys, file: str):
    strange = {}
    for number, (make, reason) in enumerate(STRANGE.values()):
        # Different configurations, which are rows of their own where the configuration can be read.
        directory = write_run("tensor_swap", seed=7, hardware={}, plan={}, top={"batch_size": 100 + number})
        (directory / file).unlink()
        make(directory / file)
        strange[f"{directory / file}: "] = reason
    rows, table = compared(write_run, tmp_path / "out")
    printed = capsys.readouterr().out
    for row, (start, reason) in zip(rows, strange.items(), strict=True):
        (said,) = row.reasons
        assert said.startswith(start)
        assert reason in said
        assert row.status == ("failed" if file in RESULTS else "ok")
        assert said in printed
        assert said.partition(": ")[2] in table


@pytest.mark.usefixtures("two_runs")
def test_numbers_and_texts_of_any_length_in_a_configuration(write_run, tmp_path: Path):
    long = {"a": "9" * 5000, "b": "word " * 100_000, "seed": "1" * 5000}
    write_run("tensor_swap", top=long, knobs={"slots": "0x" + "f" * 10_000})
    (row,), table = compared(write_run, tmp_path / "out")
    assert row.status == "ok"
    assert len(row.name) <= 300
    assert len(row.seeds) <= 40
    assert max(map(len, table.splitlines())) < 2000


@pytest.mark.usefixtures("two_runs")
def test_a_folder_that_cannot_be_read_is_one_row(write_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    closed = write_run.folder / "closed"
    closed.mkdir()
    scandir = os.scandir

    def refusing(path: str):
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    (row,), _ = compared(write_run, tmp_path / "out")
    assert (row.name, row.status, row.reasons) == ("closed", "failed", ["it cannot be read (Permission denied)"])


@pytest.mark.usefixtures("two_runs")
def test_what_files_say_cannot_act_in_any_output(write_run, tmp_path: Path, capsysbinary):
    odd = "a\r=cmd()\n\x1b[2J\u202eb\u2028\ud800<script>"
    directory = write_run("tensor_swap", knobs={"note": "\u2066x\r\n=1"}, losses=None, hardware={"gpu_name": odd})
    (directory / "summary.json").write_text(json.dumps({"status": odd, "reason": odd, "perf/step_ms": 2.0}))
    compared(write_run, tmp_path / "out")
    table, *others = [tmp_path / "out" / name for name in ("compare.csv", "compare.md", "compare.html")]
    for output in (capsysbinary.readouterr().out, *(file.read_bytes() for file in (table, *others))):
        assert not set(output.decode()) & set("\r\x1b\u202e\u2066\u2028")
    assert not any("<script>" in file.read_text() for file in others)
    cells = list(csv.reader(io.StringIO(table.read_text())))
    assert len(cells) == 4


def test_a_figure_of_an_earlier_comparison_does_not_stay(write_run):
    (write_run.folder).mkdir()
    (write_run.folder / "compare_memory.png").write_text("old")
    write_run(losses=None, step_ms=None)
    compare([write_run.folder], write_run.folder)
    assert {path.name for path in write_run.folder.iterdir()} == {
        "0", "compare.csv", "compare.md", "compare.tex", "compare.html"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.jsonl", '{"train/step": 13, "train/loss": "x"}\n'),
        ("metrics.jsonl", '{"train/step": 13, "train/loss": null, "nonfinite": ["train/loss"]}\n'),
        ("summary.json", '{"status": "ok", "nonfinite": ["perf/step_ms"]}'),
        ("summary.json", '{"status": "planned", "planned/perf/step_ms": "fast"}'),
    ],
)
def test_results_that_no_run_writes_fail_their_run_alone(write_run, file: str, content: str):
    write_run("none")
    (write_run("layer_stream") / file).write_text(content)
    resident, failed = compare([write_run.folder], write_run.folder)
    assert (resident.status, failed.status) == ("ok", "failed")
    assert f"{file}: " in failed.reasons[0]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.yaml", "{offload: {_target_: a.b.Resident}, seed: {a: 1}, day: 2001-99-99}"),
        ("config.yaml", "{offload: {_target_: null}, seed: [1, 2]}"),
        ("choices.yaml", "choices: {1: none}"),
        ("hardware.json", '{"gpu_name": ["x"], "device": 3, "h2d_gb_s": "fast"}'),
        ("plan.json", '{"fits": [true]}'),
        ("hardware.json", "\xff: ["),
    ],
)
def test_an_odd_description_leaves_the_metrics(write_run, file: str, content: str):
    write_run("none")
    directory = write_run("layer_stream", transfer__h2d_gib=1.0)
    (directory / file).write_text(content)
    assert [row.mean("perf/step_ms") for row in compare([write_run.folder], write_run.folder)] == [100.0, 100.0]
