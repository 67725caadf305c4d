"""scripts/compare.py from the command line, over a sweep of train.py and over mistakes."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.training.comparison.conftest import RunWriter
from tests.training.helpers.in_process import SMALL_MODEL
from training.runs.files import COMPARE_CSV_FILE, COMPARE_LATEX_FILE, COMPARE_MARKDOWN_FILE, COMPARE_PAGE_FILE, FIGURES

TABLES = {COMPARE_CSV_FILE, COMPARE_LATEX_FILE, COMPARE_MARKDOWN_FILE, COMPARE_PAGE_FILE}
FILES = TABLES | {f"{name}.png" for name in FIGURES}
SMALL = (
    *SMALL_MODEL, "seq_len=32", "steps=3", "warmup_steps=1", "dataset=stdlib", "dataset.max_tokens=20000",
    "tracking=disabled",
)  # fmt: skip


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=600
    )


def table(folder: Path) -> dict[str, dict[str, str]]:
    with open(folder / "compare.csv", newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("sweep")
    narrowed = ("offload=none,layer_stream", "recompute=none", "seed=0", "microbatches=1,9")
    return folder, python(
        "train.py", "-m", "experiment=offload_ablation", *narrowed, *SMALL, f"hydra.sweep.dir={folder}"
    )


@pytest.mark.slow
def test_a_sweep_with_failures_ends_with_every_artefact(sweep):
    folder, process = sweep
    assert process.returncode == 1
    assert {path.name for path in folder.iterdir() if path.name.startswith("compare")} == FILES
    rows = table(folder)
    assert [row["status"] for row in rows.values()] == ["ok", "failed", "ok", "failed"]
    stream = rows["layer_stream microbatches=1"]
    assert (stream["curve"], stream["compared_with"]) == ("equal", "none microbatches=1")
    assert float(stream["ratio_to_none"]) > 0
    assert float(stream["h2d_gib"]) > 0
    assert "microbatches=9: must be between 1 and batch_size=4" in rows["none microbatches=9"]["why"]
    assert "none microbatches=9: failed: microbatches=9: must be" in process.stdout
    assert process.stdout.count(str(folder / "compare.html")) == 1


@pytest.mark.slow
def test_directories_are_compared_again_into_another_place(sweep, tmp_path: Path):
    folder, _ = sweep
    process = python("scripts/compare.py", folder / "0", folder / "2", "--out", tmp_path / "new" / "place")
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    assert {path.name for path in (tmp_path / "new" / "place").iterdir()} == FILES
    assert list(table(tmp_path / "new" / "place")) == ["none", "layer_stream"]


def test_rows_order_and_format_for_a_paper(tmp_path: Path):
    write_run = RunWriter(tmp_path / "runs")
    for offload, step_ms in (("layer_stream", 200.0), ("tensor_swap", 150.0), ("none", 100.0)):
        write_run(offload, step_ms=step_ms, memory__rss_gib=3.0, losses=None)
    out = tmp_path / "out"
    given = ("scripts/compare.py", tmp_path / "runs", "--out", out)
    process = python(*given, "--format", "pdf", "--rows", "*_*", "--order", "step_ms")
    assert process.returncode == 0, process.stderr
    assert list(table(out)) == ["tensor_swap", "layer_stream"]
    assert {path.name for path in out.iterdir()} == TABLES | {"compare_memory.pdf"}
    unknown = python(*given, "--rows", "nothing")
    assert unknown.stderr == "error: --rows nothing: no such row; choose of: none, layer_stream, tensor_swap\n"


def test_no_run_is_one_line(tmp_path: Path):
    process = python("scripts/compare.py", tmp_path)
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith(f"error: {tmp_path}: no run in here")
    assert process.stderr.count("\n") == 1


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path):
    RunWriter(tmp_path / "runs")()
    (tmp_path / "file").touch()
    process = python("scripts/compare.py", tmp_path / "runs", "--out", tmp_path / "file")
    assert process.returncode == 1
    assert process.stderr == f"error: {tmp_path}/file: File exists; choose another place with --out DIR\n"
