"""Run directories as train.py leaves them, without training."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from training.comparison.rows import Row, build_rows
from training.comparison.runs import find_runs

TARGETS = {
    "none": "offload.modes.none.Resident",
    "layer_stream": "offload.modes.layer_stream.LayerStream",
    "shard_offload": "offload.modes.shard_offload.ShardOffload",
    "tensor_swap": "offload.modes.tensor_swap.TensorSwap",
}
OPTIMIZERS = {"adamw": "training.optim.AdamW", "host_adamw": "offload.optimizer.adamw.HostAdamW"}


class RunWriter:
    """Writes the files of one run per call, in the next numbered directory of `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.count = 0

    def __call__(
        self,
        offload: str = "none",
        *,
        seed: int = 0,
        recompute: str = "none",
        optimizer: str = "adamw",
        knobs: dict[str, Any] | None = None,
        losses: tuple[float, ...] | None = (4.0, 3.0, 2.5),
        status: str | None = "ok",
        reason: str | None = None,
        hardware: dict[str, Any] | None = None,
        plan: dict[str, Any] | None = None,
        top: dict[str, Any] | None = None,
        step_ms: float | None = 100.0,
        **metrics: float,
    ) -> Path:
        directory = self.folder / str(self.count)
        self.count += 1
        directory.mkdir(parents=True)
        config = {
            "offload": {"_target_": TARGETS[offload], "_convert_": "all", **(knobs or {})},
            "model": {"_target_": "models.llama.Llama", "hidden_size": 64},
            "optimizer": {"_target_": OPTIMIZERS[optimizer], "lr": 0.002},
            "recompute": {"blocks": recompute == "block"},
            "tracking": {"mode": "disabled", "group": f"g{self.count}"},
            "seed": seed,
            "batch_size": 8,
            "log_every": 1,
            "warmup_steps": 1,
            **(top or {}),
        }
        if offload == "shard_offload":
            config["offload"] = {"checkpoint": True, **config["offload"]}
        if optimizer == "host_adamw":
            config["optimizer"] |= {"state_dtype": "fp32", "threads": None}
        choices = {
            "offload": offload,
            "model": "tiny",
            "optimizer": optimizer,
            "recompute": recompute,
            "tracking": "disabled",
            "experiment": None,
            "hydra/launcher": "process",
        }
        (directory / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        (directory / "choices.yaml").write_text(yaml.safe_dump({"choices": choices, "overrides": []}))
        if hardware is not None:
            (directory / "hardware.json").write_text(json.dumps(hardware))
        if plan is not None:
            (directory / "plan.json").write_text(json.dumps(plan))
        metrics = {key.replace("__", "/"): value for key, value in metrics.items()}
        if step_ms is not None:
            metrics["perf/step_ms"] = step_ms
        if losses is not None:
            records = [{"train/step": i, "train/loss": loss, **metrics} for i, loss in enumerate(losses, 1)]
            (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        if status == "ok":
            summary = {"status": "ok", "reason": None, **metrics}
            if losses:
                summary |= {"steps": len(losses), "train/final_loss": losses[-1]}
            (directory / "summary.json").write_text(json.dumps(summary))
        elif status == "planned":
            planned = {key if key == "perf/floor_ms" else f"planned/{key}": value for key, value in metrics.items()}
            (directory / "summary.json").write_text(json.dumps({"status": status, "reason": reason, **planned}))
        elif status is not None:
            (directory / "summary.json").write_text(json.dumps({"status": status, "reason": reason}))
        return directory

    def rows(self) -> list[Row]:
        """Returns the rows of all runs written so far."""
        return build_rows(find_runs([self.folder]))

    def by_name(self) -> dict[str, Row]:
        return {row.name: row for row in self.rows()}


@pytest.fixture
def write_run(tmp_path: Path) -> RunWriter:
    return RunWriter(tmp_path / "runs")
