"""What a plan says: to people as a table, to programs as plan.json, to a summary under the names of its metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offload.planning.cost_model import Forecast
from offload.planning.simulated_streams import Work
from offload.runtime.byte_sizes import GIB, format_bytes
from training.metrics.names import PLANNED
from training.planning.machine import Figures

PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class RunPlan:
    """A planned run: bytes at their peak by part, bytes of a step each way, its time, and the budgets to fit in.

    `logits_bytes` are part of the activations on the device. `timeline` is what a GPU does when in forward and
    backward, as far as these were rehearsed. Without a GPU what is on the device is on the host. A budget is what was
    asked for or what the machine has, whichever is less, and None where there is none.
    """

    device_bytes: Mapping[str, int]
    host_bytes: Mapping[str, int]
    logits_bytes: int
    pinned_bytes: int
    step_bytes: Mapping[str, float]
    forecast: Forecast
    budgets: Mapping[str, int | None]
    figures: Figures
    has_gpu: bool
    timeline: tuple[Work, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def totals(self) -> dict[str, int]:
        """What is held against each budget."""
        return {"vram_budget": sum(self.device_bytes.values()), "host_budget": sum(self.host_bytes.values())}

    @property
    def fits(self) -> dict[str, bool | None]:
        """Whether it fits each budget; None where there is none."""
        return {key: None if limit is None else self.totals[key] <= limit for key, limit in self.budgets.items()}

    def misfit(self) -> str | None:
        """One line where a budget is exceeded: which, by what, and what to change."""
        advice = {
            "vram_budget": "stream more (offload), recompute=block, smaller batch_size or more microbatches",
            "host_budget": "a smaller model, precision=bf16, optimizer.state_dtype=bf16 or more on the device",
        }
        lines = [
            f"{key}: {format_bytes(self.totals[key])} wanted, {self._limit(key)} there: {advice[key]}"
            for key, fits in self.fits.items()
            if fits is False
        ]
        return "; ".join(lines) or None

    def metrics(self) -> dict[str, float]:
        """What the plan says of the figures that a run measures, under their names."""
        known = {
            "perf/step_ms": self.forecast.step_ms,
            "memory/rss_gib": self.totals["host_budget"] / GIB,
            "transfer/h2d_gib": self.step_bytes["in"] / GIB,
            "transfer/d2h_gib": self.step_bytes["out"] / GIB,
            "transfer/activations_h2d_gib": self.step_bytes["activations in"] / GIB,
            "transfer/activations_d2h_gib": self.step_bytes["activations out"] / GIB,
        }
        if self.has_gpu:
            known["memory/vram_peak_gib"] = self.totals["vram_budget"] / GIB
            known["memory/host_pinned_gib"] = self.pinned_bytes / GIB
        return known

    def summary(self) -> dict[str, float]:
        """`metrics`, as a summary holds them beside what was measured, and the floor of a step."""
        planned = {f"{PLANNED}{key}": value for key, value in self.metrics().items()}
        return {"perf/floor_ms": max(self.forecast.floors.values()), **planned}

    def as_dict(self) -> dict[str, Any]:
        """The whole plan, for plan.json: sizes in bytes, times in ms."""
        return {
            "fits": self.fits,
            "budget_bytes": dict(self.budgets),
            "device_bytes": {**self.device_bytes, "total": self.totals["vram_budget"]},
            "host_bytes": {**self.host_bytes, "total": self.totals["host_budget"]},
            "logits_bytes": self.logits_bytes,
            "page_locked_bytes": self.pinned_bytes,
            "step_bytes": dict(self.step_bytes),
            "floors_ms": self.forecast.floors,
            "phases_ms": list(self.forecast.phases_ms),
            "step_ms": self.forecast.step_ms,
            "bound": self.forecast.bound,
            "hardware": asdict(self.figures),
            "notes": list(self.notes),
        }

    def rows(self) -> dict[str, str]:
        """Label and value pairs for people."""
        step = self.step_bytes
        device = "device" if self.has_gpu else "device (here the host)"
        return {
            "hardware": f"{self.figures.name} ({self.figures.source})",
            **{f"{device}: {name}": format_bytes(part) for name, part in self.device_bytes.items() if part},
            f"{device}: at its peak": self._against("vram_budget"),
            **{f"host: {name}": format_bytes(part) for name, part in self.host_bytes.items() if part},
            "host: in all": self._against("host_budget"),
            "copied in a step": _copies(step["in"], step["activations in"]),
            "copied out a step": _copies(step["out"], step["activations out"]),
            **{f"{name} alone": f"{ms:,.1f} ms" for name, ms in self.forecast.floors.items() if ms},
            "predicted step": f"{self.forecast.step_ms:,.1f} ms, bound by {self.forecast.bound}",
            **{f"note {number}": note for number, note in enumerate(self.notes, start=1)},
        }

    def _against(self, budget: str) -> str:
        total = format_bytes(self.totals[budget])
        if self.budgets[budget] is None:
            return total
        return f"{total} of {self._limit(budget)}: {'fits' if self.fits[budget] else 'DOES NOT FIT'}"

    def _limit(self, budget: str) -> str:
        """A budget that there is, and what sets it: its key, or the machine."""
        there_gib = {"vram_budget": self.figures.vram_gib, "host_budget": self.figures.host_gib}[budget]
        is_machines = there_gib is not None and self.budgets[budget] == int(there_gib * GIB)
        return f"{format_bytes(self.budgets[budget])} ({self.figures.name if is_machines else budget})"

    def write(self, run_dir: Path) -> None:
        """Writes plan.json into the run's directory."""
        (run_dir / PLAN_FILE).write_text(json.dumps(self.as_dict(), indent=2) + "\n")


def _copies(total: float, activations: float) -> str:
    return format_bytes(int(total)) + (
        f", of these activations {format_bytes(int(activations))}" if activations else ""
    )
