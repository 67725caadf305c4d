"""Makes a wandb workspace that compares the runs of a project: speed, memory and loss of the modes side by side.

    python scripts/dashboard.py                                   # writes wandb_workspace.json
    python scripts/dashboard.py --group 2026-11-21-14-02-03       # one sweep: the last two names of its directory
    wandb login && python scripts/dashboard.py --publish          # saves it at wandb and prints its address

The specification is written in every case, without a login or a network. This needs wandb-workspaces (pip install
wandb-workspaces). Runs that were recorded offline appear once they are uploaded: wandb sync DIR/wandb.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.errors import UserError, first_line
from training.runs.files import WORKSPACE_FILE
from training.visible_text import visible

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

PROJECT = "lightering"
PACKAGE = "wandb-workspaces"
NAME = "Offload modes"
# Columns beside each run's name, in this order.
COLUMNS = (
    "status", "perf/step_ms", "perf/floor_ratio", "perf/tokens_per_s", "perf/images_per_s", "memory/vram_peak_gib",
    "memory/host_pinned_gib", "transfer/stall_ms", "train/final_loss", "eval/final_loss", "reason",
)  # fmt: skip
# Charts with one bar for each label: title, metric, unit.
BARS = (
    ("Step time", "perf/step_ms", "ms"),
    ("Peak VRAM", "memory/vram_peak_gib", "GiB"),
    ("Compute waiting for copies", "transfer/stall_ms", "ms a step"),
    ("Throughput", "perf/tokens_per_s", "tokens/s"),
    ("Page-locked host memory", "memory/host_pinned_gib", "GiB"),
    ("Step waiting for updates", "optimizer/wait_ms", "ms a step"),
)
# Charts with one line for each run over the steps: title, metrics, unit.
CURVES = (
    ("Held-out loss", ("eval/loss",), None),
    ("Gradient norm", ("train/grad_norm",), None),
    ("Step time", ("perf/step_ms",), "ms"),
    ("Copied in", ("transfer/h2d_gib",), "GiB a step"),
    ("Copied out", ("transfer/d2h_gib",), "GiB a step"),
    ("VRAM: live and held", ("memory/vram_peak_gib", "memory/vram_reserved_gib"), "GiB"),
    ("Host memory of the process", ("memory/rss_gib",), "GiB"),
)
TIMELINE = "trace/timeline"
# The key of a run's configuration in wandb that runs share which differ in their seed alone.
LABEL = "label"
MAX_RUNS = 100


def workspace(entity: str, project: str, group: str | None = None) -> Workspace:
    """Builds the workspace of a project, or of one `group` of its runs; runs that differ only in seed share a bar."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    by_label = {"groupby": wr.Config(LABEL), "groupby_aggfunc": "mean", "max_runs_to_show": MAX_RUNS}
    scatter = wr.ScatterPlot(
        title="Step time against peak VRAM",
        x=wr.SummaryMetric("memory/vram_peak_gib"),
        y=wr.SummaryMetric("perf/step_ms"),
        legend_template="${run:displayName}",
    )
    bars = [
        wr.BarPlot(title=f"{title} ({unit})", metrics=[metric], title_x=unit, groupby_rangefunc="stddev", **by_label)
        for title, metric, unit in BARS
    ]
    over_steps = {"x": "train/step", "title_x": "step"}
    loss = wr.LinePlot(
        title="Loss", y=["train/loss"], groupby_rangefunc="minmax", smoothing_type="none", **over_steps, **by_label
    )
    curves = [
        wr.LinePlot(title=title, y=list(metrics), title_y=unit, max_runs_to_show=MAX_RUNS, **over_steps)
        for title, metrics, unit in CURVES
    ]
    timelines = wr.MediaBrowser(title="One step of each run (trace=true)", media_keys=[TIMELINE], num_columns=1)

    def section(name: str, panels: list, columns: int) -> ws.Section:
        layout = ws.SectionLayoutSettings(columns=columns, rows=-(-len(panels) // columns))
        return ws.Section(name=name, panels=panels, is_open=True, layout_settings=layout)

    return ws.Workspace(
        entity=entity,
        project=project,
        name=NAME if group is None else f"{NAME}: {group}",
        sections=[
            section("Speed and memory", [scatter, *bars], 2),
            section("Training", [loss, *curves], 2),
            section("Timelines", [timelines], 1),
        ],
        settings=ws.WorkspaceSettings(x_axis="train/step", max_runs=MAX_RUNS, group_by_prefix="first"),
        runset_settings=ws.RunsetSettings(
            groupby=[expr.Config(LABEL)],
            order=[expr.Ordering(expr.Summary("perf/step_ms"))],
            pinned_columns=["run:displayName", *(f"summary:{column}" for column in COLUMNS)],
            filters="" if group is None else expr.And(expr.Metric("Group") == group),
        ),
    )


def specification(built: Workspace) -> str:
    """Returns the workspace as the JSON that wandb's server stores for a view, with its name, entity and project."""
    return built._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=2) + "\n"


def publish(built: Workspace) -> str:
    """Saves the workspace as a new view; returns its address. Raises UserError without a login, or if wandb refuses."""
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise UserError("--publish: no wandb API key is set: run `wandb login`, then the same command again")
    try:
        built.entity = built.entity or wandb.Api().default_entity or ""
        return built.save().url
    except Exception as error:  # wandb, its dependencies and the network raise many kinds
        where = "/".join(filter(None, (built.entity, built.project)))
        raise UserError(f"--publish: wandb refused the workspace for {where} ({first_line(error)})") from error


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--project", default=PROJECT, help=f"the runs' tracking.project [{PROJECT}]")
    options.add_argument("--entity", help="wandb user or team, the runs' WANDB_ENTITY [your default one]")
    options.add_argument("--group", help="compare only the runs of this group (a sweep's jobs are one)")
    options.add_argument(
        "--out", type=Path, default=WORKSPACE_FILE, metavar="FILE", help=f"the specification [{WORKSPACE_FILE}]"
    )
    options.add_argument("--publish", action="store_true", help="save the workspace at wandb; needs a login")
    return options


def main() -> None:
    options = parser().parse_args()
    if find_spec("wandb_workspaces") is None:
        raise UserError(f"the dashboard needs {PACKAGE}, which is not installed: pip install {PACKAGE}")
    built = workspace(options.entity or "", options.project, options.group)
    try:
        options.out.write_text(specification(built))
    except OSError as error:
        raise UserError(f"--out {options.out}: {error.strerror}") from error
    print(f"specification: {options.out}")
    if options.publish:
        print(f"workspace: {publish(built)}")
    else:
        again = shlex.join(["python", *sys.argv])
        print(f"to publish it: wandb login && {again} --publish")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {visible(error)}")
