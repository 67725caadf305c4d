"""Small runs on rows of a file, and those without offloading that others are compared with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.training.helpers.in_process import SMALL_MODEL, run_here

RUN = ("dataset.eval_share=0.25", "log_every=1", "warmup_steps=1", "eval.every=2", "optimizer.lr=0.01")
COMPARED = ("train/step", "train/loss", "train/grad_norm", "eval/loss")


def overrides_for(folder: Path, rows: Iterable[dict[str, Any]], *given: str) -> tuple[str, ...]:
    """Writes rows to a file in `folder`; returns the overrides of a run on them."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = (key for key in SMALL_MODEL if not key.startswith("dataset"))
    return (*small, *given, f"dataset.files={file}", *RUN, "tracking=disabled")


def curve(folder: Path) -> list[dict[str, float]]:
    """Returns losses, norms and rewards of each step and each evaluation."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {key: value for key, value in line.items() if key in COMPARED or "/reward_" in key}
        for line in lines
        if line["train/step"] or "eval/loss" in line
    ]


class Without:
    """Makes runs without offloading in `folder`, each once."""

    def __init__(self, folder: Path, overrides: tuple[str, ...]):
        self._folder, self._overrides = folder, overrides
        self._made: dict[tuple[str, ...], Path] = {}

    def __call__(self, *keys: str) -> Path:
        """Returns the folder of the run with these overrides too."""
        if keys not in self._made:
            self._made[keys] = self._folder / f"{len(self._made)}"
            run_here(self._made[keys], *self._overrides, *keys)
            losses = [line["train/loss"] for line in curve(self._made[keys]) if "train/loss" in line]
            assert len(losses) >= 3
            assert losses[-1] != losses[0]
        return self._made[keys]
