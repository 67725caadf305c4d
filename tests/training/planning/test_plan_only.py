"""plan=true prints a plan and writes its files; one that does not fit ends non-zero, with what to change."""

import json
from pathlib import Path

from tests.training.helpers.in_process import TINY_RUN, command_here
from training.runs.files import PLAN_FILE, PLAN_PICTURE, SUMMARY_FILE


def test_a_plan_that_does_not_fit_is_written_and_ends_non_zero(tmp_path: Path):
    job = ("plan=true", *TINY_RUN, "offload=layer_stream", f"hydra.run.dir={tmp_path}")
    result = command_here(*job, "vram_budget=200KiB")
    assert result.returncode == 1
    assert result.stderr.startswith("error: vram_budget: ")
    assert result.stderr.count("\n") == 1
    summary = json.loads((tmp_path / SUMMARY_FILE).read_text())
    assert summary["status"] == "planned"
    assert f"error: {summary['reason']}\n" == result.stderr
    assert summary["planned/perf/step_ms"] > 0
    assert {PLAN_FILE, PLAN_PICTURE, "config.yaml"} <= {path.name for path in tmp_path.iterdir()}
    advice = summary["reason"].partition(": take ")[2].partition(" (planned: ")[0].split()
    assert advice
    fits = command_here(*job, "vram_budget=200KiB", *advice)
    assert fits.returncode == 0, fits.stderr
    assert "DOES NOT FIT" not in fits.stdout


def test_a_metric_that_the_run_would_not_measure_is_refused(tmp_path: Path):
    result = command_here("plan=true", *TINY_RUN, "checkpoint.best=eval/loss", f"hydra.run.dir={tmp_path}")
    assert result.returncode == 1
    assert result.stderr.startswith("error: checkpoint.best=eval/loss: the run does not evaluate: give eval.every=N")
