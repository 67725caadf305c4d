"""The wandb workspace: wandb-workspaces reads its specification, and it names metrics that runs record."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hydra import compose

from tests import ROOT
from tests.training.helpers.in_process import conf_initialised

pytest.importorskip("wandb_workspaces", reason="wandb-workspaces is not installed (pip install wandb-workspaces)")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it uses deprecated features of pydantic
    import wandb_workspaces.reports.v2 as wr
    from wandb_workspaces.workspaces import Workspace, internal

from scripts import dashboard
from training.config.modes import options_of
from training.errors import UserError
from training.metric_names import METRIC_KEYS, SUMMARY_KEYS

RECORDED = {*METRIC_KEYS, *SUMMARY_KEYS, "status", "reason", dashboard.TIMELINE}


@pytest.fixture(autouse=True)
def no_login(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)


def read(specification: str) -> Workspace:
    return Workspace._from_model(internal.View.model_validate_json(specification))


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["scripts/dashboard.py", *arguments])
    dashboard.main()


@pytest.mark.parametrize("group", [None, "2031-01-02-03-04-05"])
def test_the_specification_validates_and_reads_back_equal(group):
    written = dashboard.specification(dashboard.workspace("someone", "lightering", group))
    again = read(written)
    assert dashboard.specification(again) == written
    assert (again.entity, again.project) == ("someone", "lightering")
    assert [str(key.name) for key in again.runset_settings.groupby] == [dashboard.LABEL]
    assert (group or "") in again.runset_settings.filters
    assert bool(again.runset_settings.filters) == (group is not None)


def test_it_shows_what_people_compare_by_metrics_that_runs_record():
    built = dashboard.workspace("", "lightering")
    panels = [panel for section in built.sections for panel in section.panels]
    scatter = next(panel for panel in panels if isinstance(panel, wr.ScatterPlot))
    assert (scatter.x.name, scatter.y.name) == ("memory/vram_peak_gib", "perf/step_ms")
    bars = [panel for panel in panels if isinstance(panel, wr.BarPlot)]
    assert all(bar.groupby == wr.Config(dashboard.LABEL) for bar in bars)
    lines = [panel for panel in panels if isinstance(panel, wr.LinePlot)]
    assert lines[0].y == ["train/loss"]
    assert all(line.x == "train/step" for line in lines)
    written = dashboard.specification(built)
    named = set(re.findall(r'"(?:summary:)?((?:train|perf|memory|transfer|optimizer|trace)/\w+)"', written))
    assert {"train/loss", "perf/step_ms", "transfer/stall_ms", "trace/timeline"} <= named <= RECORDED
    assert {*dashboard.COLUMNS} <= RECORDED


def test_without_a_login_it_writes_a_file_and_says_how_to_publish(tmp_path: Path):
    command = [sys.executable, ROOT / "scripts" / "dashboard.py", "--project=mine", "--group", "my sweep"]
    result = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    specification, publish = result.stdout.splitlines()
    assert specification == "specification: wandb_workspace.json"
    assert publish.endswith("scripts/dashboard.py --project=mine --group 'my sweep' --publish")
    assert "my sweep" in read((tmp_path / "wandb_workspace.json").read_text()).name


def test_publishing_without_a_login_is_one_line(monkeypatch, tmp_path: Path):
    with pytest.raises(UserError, match="--publish: no wandb API key is set: run `wandb login`"):
        run(monkeypatch, "--publish", "--out=mine.json")
    assert json.loads((tmp_path / "mine.json").read_text())["project"] == "lightering"


def test_publishing_saves_the_workspace_for_the_default_entity(monkeypatch, capsys):
    import wandb

    def upsert(view) -> dict:
        assert (view.entity, view.project) == ("someone", "lightering")
        return {"upsertView": {"view": {"name": "nw-abc-v", "id": "1"}}}

    class Api:
        default_entity = "someone"

    monkeypatch.setattr(wandb, "login", lambda **_: True)
    monkeypatch.setattr(wandb, "Api", Api)
    monkeypatch.setattr(internal, "upsert_view2", upsert)
    monkeypatch.setattr("wandb_workspaces.workspaces.interface.get_app_url", lambda _: "https://wandb.ai")
    run(monkeypatch, "--publish")
    assert capsys.readouterr().out.splitlines()[-1] == "workspace: https://wandb.ai/someone/lightering?nw=abc"


def test_the_project_is_the_one_that_runs_go_to():
    for option in options_of("tracking"):
        with conf_initialised():
            assert compose("config", [f"tracking={option}"]).tracking.project == dashboard.PROJECT
