"""Builds a saved wandb workspace that compares runs, as a specification.

This needs the optional package wandb-workspaces; nothing else does.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from training.errors import UserError, first_line

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

PACKAGE = "wandb-workspaces"
NAME = "Offload modes"
# Columns beside each run's name, in this order.
COLUMNS = (
    "summary:status",
    "summary:perf/step_ms",
    "summary:perf/floor_ratio",
    "summary:perf/tokens_per_s",
    "summary:perf/images_per_s",
    "summary:memory/vram_peak_gib",
    "summary:memory/host_pinned_gib",
    "summary:transfer/stall_ms",
    "summary:train/final_loss",
    "summary:eval/final_loss",
    "summary:reason",
)
# Charts with one bar for each mode: title, metric, unit.
BARS = (
    ("Step time", "perf/step_ms", "ms"),
    ("Peak VRAM", "memory/vram_peak_gib", "GiB"),
    ("Compute waiting for copies", "transfer/stall_ms", "ms a step"),
    ("Throughput", "perf/tokens_per_s", "tokens/s"),
    ("Page-locked host memory", "memory/host_pinned_gib", "GiB"),
    ("Step waiting for updates", "optimizer/wait_ms", "ms a step"),
)
# Charts with one line for each mode over the steps: title, metrics, unit.
CURVES = (
    ("Held-out loss", ("eval/loss",), ""),
    ("Gradient norm", ("train/grad_norm",), ""),
    ("Step time", ("perf/step_ms",), "ms"),
    ("Copied in", ("transfer/h2d_gib",), "GiB a step"),
    ("Copied out", ("transfer/d2h_gib",), "GiB a step"),
    ("VRAM: live and held", ("memory/vram_peak_gib", "memory/vram_reserved_gib"), "GiB"),
    ("Host memory of the process", ("memory/rss_gib",), "GiB"),
)
TIMELINE = "trace/timeline"
MAX_RUNS = 100


def workspace(entity: str, project: str, group: str | None = None) -> Workspace:
    """Builds the workspace for `entity`/`project`: runs grouped by offload mode, only those of `group` if it is given.

    Uses no network. Raises UserError if wandb-workspaces is not installed.
    """
    require_package()
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    return ws.Workspace(
        entity=entity,
        project=project,
        name=NAME if group is None else f"{NAME}: {group}",
        sections=[_trade_off(), _training(), _timelines()],
        settings=ws.WorkspaceSettings(x_axis="train/step", max_runs=MAX_RUNS, group_by_prefix="first"),
        runset_settings=ws.RunsetSettings(
            groupby=[expr.Config("choices.offload")],
            order=[expr.Ordering(expr.Summary("perf/step_ms"))],
            pinned_columns=["run:displayName", *COLUMNS],
            filters="" if group is None else expr.And(expr.Metric("Group") == group),
        ),
    )


def specification(built: Workspace) -> str:
    """Returns the workspace as the JSON that wandb's server stores for a view, with its name, entity and project."""
    return built._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=2) + "\n"


def publish(built: Workspace) -> str:
    """Saves the workspace at wandb as a new view and returns its address.

    Without an entity it goes to the user's default one. Raises UserError without a login, and if wandb refuses.
    """
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise UserError("--publish: no wandb API key is set: run `wandb login`, then the same command again")
    try:
        built.entity = built.entity or wandb.Api().default_entity or ""
        return built.save().url
    except Exception as error:  # wandb, its dependencies and the network raise many kinds
        where = "/".join(filter(None, (built.entity, built.project)))
        raise UserError(f"--publish: wandb refused the workspace for {where} ({first_line(error)})") from error


def require_package() -> None:
    """Raises UserError if wandb-workspaces is not installed."""
    if find_spec("wandb_workspaces") is None:
        raise UserError(f"the dashboard needs {PACKAGE}, which is not installed: pip install {PACKAGE}")


def _trade_off() -> Section:
    import wandb_workspaces.reports.v2 as wr

    scatter = wr.ScatterPlot(
        title="Step time against peak VRAM",
        x=wr.SummaryMetric("memory/vram_peak_gib"),
        y=wr.SummaryMetric("perf/step_ms"),
        legend_template="${run:displayName}",
    )
    bars = [
        wr.BarPlot(
            title=f"{title} ({unit})",
            metrics=[metric],
            title_x=unit,
            groupby=wr.Config("choices.offload"),
            groupby_aggfunc="mean",
            groupby_rangefunc="stddev",
            max_runs_to_show=MAX_RUNS,
        )
        for title, metric, unit in BARS
    ]
    return _section("Speed and memory", [scatter, *bars], columns=2)


def _training() -> Section:
    import wandb_workspaces.reports.v2 as wr

    loss = wr.LinePlot(
        title="Loss",
        x="train/step",
        y=["train/loss"],
        title_x="step",
        groupby=wr.Config("choices.offload"),
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
        smoothing_type="none",
        max_runs_to_show=MAX_RUNS,
    )
    curves = [
        wr.LinePlot(
            title=f"{title} ({unit})" if unit else title,
            x="train/step",
            y=list(metrics),
            title_x="step",
            title_y=unit or None,
            max_runs_to_show=MAX_RUNS,
        )
        for title, metrics, unit in CURVES
    ]
    return _section("Training", [loss, *curves], columns=2)


def _timelines() -> Section:
    import wandb_workspaces.reports.v2 as wr

    browser = wr.MediaBrowser(title="One step of each run (trace=true)", media_keys=[TIMELINE], num_columns=1)
    return _section("Timelines", [browser], columns=1)


def _section(name: str, panels: list, columns: int) -> Section:
    import wandb_workspaces.workspaces as ws

    rows = -(-len(panels) // columns)
    layout = ws.SectionLayoutSettings(columns=columns, rows=rows)
    return ws.Section(name=name, panels=panels, is_open=True, layout_settings=layout)
