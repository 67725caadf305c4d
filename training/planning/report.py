"""A finished plan: for people a table, for programs plan.json, for a run's summary the values of its metrics."""

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
from training.planning.machine import Machine
from training.runs.files import PLAN_FILE


@dataclass(frozen=True)
class RunPlan:
    """A planned run: peak bytes by part, bytes copied in a step, the time of a step, and the budgets to fit in.

    `logits_bytes` are part of the activations on the device. `timeline` is the GPU's work in forward and backward, as
    far as the dry run went. Without a GPU the bytes of the device are on the host. A budget is what was asked for or
    what the machine has, whichever is less, and None if neither is known.
    """

    device_bytes: Mapping[str, int]
    host_bytes: Mapping[str, int]
    logits_bytes: int
    pinned_bytes: int
    step_bytes: Mapping[str, float]
    forecast: Forecast
    budgets: Mapping[str, int | None]
    machine: Machine
    has_gpu: bool
    timeline: tuple[Work, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def totals(self) -> dict[str, int]:
        """The planned bytes that each budget limits."""
        return {"vram_budget": sum(self.device_bytes.values()), "host_budget": sum(self.host_bytes.values())}

    @property
    def fits(self) -> dict[str, bool | None]:
        """True or False for each budget; None for a budget that is not known."""
        return {key: None if limit is None else self.totals[key] <= limit for key, limit in self.budgets.items()}

    def misfit(self) -> str | None:
        """Returns one line if a budget is exceeded: the key, both sizes and what to change."""
        advice = {
            "vram_budget": "stream more (offload), recompute=block, smaller batch_size or more microbatches",
            "host_budget": "a smaller model, precision=bf16, optimizer.state_dtype=bf16 or more on the device",
        }
        lines = [
            f"{key}: {format_bytes(self.totals[key])} needed, {self._limit(key)} available: {advice[key]}"
            for key, fits in self.fits.items()
            if fits is False
        ]
        return "; ".join(lines) or None

    def metrics(self) -> dict[str, float]:
        """Returns the planned values of the metrics that a run measures."""
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
        """Returns `metrics` under the names that they have in a run's summary, and the floor of a step."""
        planned = {f"{PLANNED}{key}": value for key, value in self.metrics().items()}
        return {"perf/floor_ms": max(self.forecast.floors.values()), **planned}

    def as_dict(self) -> dict[str, Any]:
        """Returns the whole plan, for plan.json: sizes in bytes, times in ms."""
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
            "hardware": asdict(self.machine),
            "notes": list(self.notes),
        }

    def rows(self) -> dict[str, str]:
        """Returns the plan for people: values by label."""
        step = self.step_bytes
        device = "device" if self.has_gpu else "device (here the host)"
        return {
            "hardware": f"{self.machine.name} ({self.machine.source})",
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
        """Formats a budget with its origin: its key, or the name of the machine."""
        all_gib = {"vram_budget": self.machine.vram_gib, "host_budget": self.machine.host_gib}[budget]
        is_all = all_gib is not None and self.budgets[budget] == int(all_gib * GIB)
        return f"{format_bytes(self.budgets[budget])} ({self.machine.name if is_all else budget})"

    def write(self, run_dir: Path) -> None:
        """Writes plan.json into the run's directory."""
        (run_dir / PLAN_FILE).write_text(json.dumps(self.as_dict(), indent=2) + "\n")


def _copies(total: float, activations: float) -> str:
    return format_bytes(int(total)) + (
        f", of these activations {format_bytes(int(activations))}" if activations else ""
    )
