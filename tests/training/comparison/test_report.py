"""Reports: which files a comparison writes, and that each is replaced as a whole."""

from __future__ import annotations

import pytest

from training.comparison.report import compare


def test_a_figure_of_an_earlier_comparison_does_not_stay(write_run):
    (write_run.folder).mkdir()
    (write_run.folder / "compare_memory.png").write_text("old")
    write_run(losses=None, step_ms=None)
    compare([write_run.folder], write_run.folder)
    assert {path.name for path in write_run.folder.iterdir()} == {"0", "compare.csv", "compare.md", "compare.html"}


@pytest.mark.parametrize(
    "line",
    [
        '{"train/step": 13, "train/loss": null}',
        '{"train/step": 13, "train/loss": "x"}',
        '{"train/step": 13, "train/loss": true}',
        '{"train/step": "13", "train/loss": 2.0}',
        '{"train/step": null, "train/loss": 2.0}',
        '{"train/step": 13, "train/loss": 2.0, "perf/step_ms": -1.0}',
        '{"train/step": 13, "train/loss": null, "nonfinite": ["train/loss"]}',
        '{"train/step": 13, "train/loss": 2.0, "nonfinite": {"train/loss": []}}',
    ],
)
@pytest.mark.slow
def test_a_record_that_no_run_writes_fails_its_run_alone(write_run, line: str):
    write_run("none")
    odd = write_run("layer_stream") / "metrics.jsonl"
    odd.write_text(odd.read_text() + line + "\n")
    resident, failed = compare([write_run.folder], write_run.folder)
    assert (resident.status, failed.status) == ("ok", "failed")
    assert "metrics.jsonl: line 4 is not a record: " in failed.reasons[0]


@pytest.mark.parametrize(
    "summary",
    [
        '{"status": "ok", "perf/step_ms": null, "memory/rss_gib": 1.0, "nonfinite": {"perf/step_ms": "inf"}}',
        '{"status": "ok", "nonfinite": ["perf/step_ms"]}',
        '{"status": "planned", "planned/perf/step_ms": "fast"}',
        '{"status": "ok", "train/final_loss": 1' + "0" * 400 + "}",
    ],
)
def test_a_summary_that_no_run_writes_fails_its_run_alone(write_run, summary: str):
    write_run("none")
    (write_run("layer_stream") / "summary.json").write_text(summary)
    resident, failed = compare([write_run.folder], write_run.folder)
    assert (resident.status, failed.status) == ("ok", "failed")
    assert "summary.json: " in failed.reasons[0]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.yaml", "{offload: {_target_: a.b.Resident}, seed: [1, 2]}"),
        ("config.yaml", "{offload: {_target_: a.b.Resident}, seed: {a: 1}}"),
        ("config.yaml", "{offload: {_target_: null}, seed: 0}"),
        ("config.yaml", "{offload: {_target_: 3}, seed: 0}"),
        ("config.yaml", "{offload: {_target_: Resident}, day: 2001-99-99}"),
        ("choices.yaml", "choices: {1: none}"),
        ("hardware.json", '{"gpu_name": ["x"], "device": 3, "h2d_gb_s": "fast"}'),
        ("plan.json", '{"fits": [true]}'),
    ],
)
@pytest.mark.slow
def test_an_odd_description_leaves_the_metrics(write_run, file: str, text: str):
    write_run("none")
    directory = write_run("layer_stream", transfer__h2d_gib=1.0)
    (directory / file).write_text(text)
    assert [row.mean("perf/step_ms") for row in compare([write_run.folder], write_run.folder)] == [100.0, 100.0]
