"""A finished plan: for people a table, for programs plan.json, for a run's summary the values of its metrics."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offload.knobs import GIB, format_bytes
from offload.planning import Forecast, Work
from training.config.rates import Choice, shown
from training.metric_names import PLANNED
from training.planning.encoding import PlannedEncoding
from training.planning.machine import Machine
from training.profiling.hardware import provenance
from training.runs.files import PLAN_FILE, write_whole

BUDGETS = ("vram_budget", "host_budget")
# What a disk is taken to write; no plan measures one.
DISK_BYTES_PER_S = GIB


@dataclass(frozen=True)
class Limit:
    """Bytes that a run may take, and in words whose they are."""

    nbytes: int
    origin: str

    def __str__(self) -> str:
        return f"{format_bytes(self.nbytes)} ({self.origin})"


@dataclass(frozen=True)
class RunPlan:
    """A planned run: peak bytes by part, bytes copied in a step, the time of a step, and the budgets to fit in.

    Without a GPU the bytes of the device are on the host.

    Attributes:
        logits_bytes: the activations on the device that are logits.
        square_bytes: those that are masks and scores of all pairs of tokens, of long sequences.
        kept_bytes: the activations that offload.budget=auto is taken to keep; a run keeps what there is room for.
        streamed: the share of the weights that stream; None where none do.
        timeline: the work of forward and backward, as far as the dry run went, and of the update.
        checkpoint_bytes: of one on disk; 0 where the run is to save none.
        chosen: explains values that were not given, by key.
        facts: what the dataset says of its data, by label.
        budgets: what was asked for or what the machine has, whichever is less; None if neither is known.
        model_flops: those of a step without recomputation; 0 where they are not known.
        clipped_ms: the time of a step that is clipped, where other steps update before their norm is known; else None.
        encoding: of captioned pictures, before the first step; None where nothing is to be encoded, or that is unknown.
        floor_ms: the shortest possible step; None on the CPU, whose figures are no bound.
        units: what a step trains on, of `unit` ("tokens"), on all devices.
        steps: of the whole run; None where they follow from `epochs`.
    """

    device_bytes: Mapping[str, int]
    host_bytes: Mapping[str, int]
    logits_bytes: int
    pinned_bytes: int
    step_bytes: Mapping[str, float]
    forecast: Forecast
    model_flops: float
    floor_ms: float | None
    budgets: Mapping[str, int | None]
    machine: Machine
    has_gpu: bool
    clipped_ms: float | None = None
    encoding: PlannedEncoding | None = None
    square_bytes: int = 0
    kept_bytes: int = 0
    streamed: float | None = None
    timeline: tuple[Work, ...] = ()
    notes: tuple[str, ...] = ()
    chosen: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    parameters: int = 0
    trained_parameters: int = 0
    checkpoint_bytes: int = 0
    units: int = 0
    unit: str = ""
    microbatches: int = 1
    steps: int | None = None

    @property
    def totals(self) -> dict[str, int]:
        """The planned bytes that each budget limits."""
        return {"vram_budget": sum(self.device_bytes.values()), "host_budget": sum(self.host_bytes.values())}

    @property
    def fits(self) -> dict[str, bool | None]:
        """True or False for each budget; None for a budget that is not known."""
        return {key: None if limit is None else self.totals[key] <= limit for key, limit in self.budgets.items()}

    def limits(self) -> dict[str, Limit]:
        """Returns the budgets that are known, each with its origin: its key, or the name of the machine."""
        gib = {"vram_budget": self.machine.vram_gib, "host_budget": self.machine.host_gib}
        everything = {key: int(value * GIB) for key, value in gib.items() if value is not None}
        return {
            key: Limit(nbytes, self.machine.name if nbytes == everything.get(key) else key)
            for key, nbytes in self.budgets.items()
            if nbytes is not None
        }

    def exceeded(self) -> dict[str, Limit]:
        """Returns the budgets that are known and exceeded, as `limits` does."""
        return {key: limit for key, limit in self.limits().items() if self.totals[key] > limit.nbytes}

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
        """Returns `metrics` under the names that they have in a run's summary, the floor and the parameters."""
        planned = {f"{PLANNED}{key}": value for key, value in self.metrics().items()}
        floor = {} if self.floor_ms is None else {"perf/floor_ms": self.floor_ms}
        return {**self.counts(), **floor, **planned}

    def counts(self) -> dict[str, int]:
        """Returns the numbers of parameters, under the names that they have in a run's summary."""
        return {"model/parameters": self.parameters, "model/trained_parameters": self.trained_parameters}

    def as_dict(self) -> dict[str, Any]:
        """Returns the whole plan, for plan.json: sizes in bytes, times in ms."""
        return {
            "fits": self.fits,
            "budget_bytes": dict(self.budgets),
            "device_bytes": {**self.device_bytes, "total": self.totals["vram_budget"]},
            "host_bytes": {**self.host_bytes, "total": self.totals["host_budget"]},
            "parameters": self.parameters,
            "trained_parameters": self.trained_parameters,
            "logits_bytes": self.logits_bytes,
            "square_bytes": self.square_bytes,
            "page_locked_bytes": self.pinned_bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
            "step_bytes": dict(self.step_bytes),
            "floor_ms": self.floor_ms,
            "alone_ms": self.forecast.alone_ms,
            "phases_ms": list(self.forecast.phases_ms),
            "step_ms": self.forecast.step_ms,
            "clipped_step_ms": self.clipped_ms,
            "bound": self.forecast.bound,
            "hardware": asdict(self.machine),
            "streamed_share": self.streamed,
            "notes": list(self.notes),
            "chosen": dict(self.chosen),
            "data": dict(self.facts),
            "encoding": None if self.encoding is None else asdict(self.encoding),
        }

    def rows(self) -> dict[str, str]:
        """Returns the plan for people: values by label."""
        step, before, some = self.step_bytes, self.encoding, self.trained_parameters
        trained = f"{some:,} of {self.parameters:,}, {some / max(self.parameters, 1):.2%}"
        device = "device" if self.has_gpu else "device (here the host)"
        return {
            "hardware": f"{self.machine.name} ({self.machine.source})",
            **self.chosen,
            **{f"data: {name}": fact for name, fact in self.facts.items()},
            **({} if before is None else before.rows(device, *(self._against(key, before.totals) for key in BUDGETS))),
            **({} if some == self.parameters else {"parameters that train": trained}),
            **{f"{device}: {name}": format_bytes(part) for name, part in self.device_bytes.items() if part},
            f"{device}: at its peak": self._against("vram_budget", self.totals),
            **{f"host: {name}": format_bytes(part) for name, part in self.host_bytes.items() if part},
            "host: in all": self._against("host_budget", self.totals),
            **{
                f"copied {way} a step": _copies(step[way], step[f"activations {way}"])
                for way in ("in", "out")
                if step[way]
            },
            **({} if self.streamed is None else {"weights that stream": f"{self.streamed:.0%}"}),
            **{f"{name} alone": f"{ms:,.1f} ms" for name, ms in self.forecast.alone_ms.items() if ms},
            **({} if self.floor_ms is None else {"shortest possible step": f"{self.floor_ms:,.1f} ms"}),
            "predicted step": f"{self.forecast.step_ms:,.1f} ms, bound by {self.forecast.bound}",
            **({} if self.clipped_ms is None else {"predicted clipped step": f"{self.clipped_ms:,.1f} ms"}),
            **self._speed(),
            **self._checkpoint(),
            **{f"note {number}": note for number, note in enumerate(self.notes, start=1)},
        }

    def brief(self) -> dict[str, str]:
        """Returns what the start of a run tells of its plan: about ten lines, by label."""
        before, trains = self.encoding, self.trained_parameters / max(self.parameters, 1)
        # Without a GPU, those of the device are among the host's.
        on_host = {**self.host_bytes, **({} if self.has_gpu else {"device": 0, **self.device_bytes})}
        parts = {"vram_budget": self.device_bytes, "host_budget": on_host}
        fits = {
            key: f"{self._against(key, self.totals)}; {(most := max(parts[key], key=parts[key].get))}"
            f" {format_bytes(parts[key][most])}"
            for key in BUDGETS
        }
        streams = "" if self.streamed is None else f"; {self.streamed:.0%} of the weights stream"
        copies = [f"{format_bytes(int(self.step_bytes[way]))} {way}" for way in ("in", "out") if self.step_bytes[way]]
        microbatches = f" in {self.microbatches} microbatches" if self.microbatches > 1 else ""
        return {
            "hardware": f"{self.machine.name} ({self.machine.source})",
            "model": f"{shown(self.parameters)} parameters, {'all' if trains == 1 else f'{trains:.2%}'} train{streams}",
            **({"data": "; ".join(f"{name}: {fact}" for name, fact in self.facts.items())} if self.facts else {}),
            **({} if before is None else {"encoding": before.summary}),
            **({"device": fits["vram_budget"]} if self.has_gpu else {}),
            "host": fits["host_budget"],
            **({"copies": f"{', '.join(copies)} a step"} if copies else {}),
            "step": f"{_time(self.forecast.step_ms)} for {self.units:,} {self.unit}{microbatches}, bound by"
            f" {self.forecast.bound}",
            **self._speed(),
            **({"chosen": chosen} if (chosen := _in_brief(self.chosen)) else {}),
            **{f"note {number}": note for number, note in enumerate(self.notes, start=1)},
        }

    def _speed(self) -> dict[str, str]:
        step_s = self.forecast.step_ms / 1e3
        if not step_s or not self.units:
            return {}
        rate = self.units / step_s
        run = "" if self.steps is None else f"; {self.steps:,} steps take {_time(self.steps * step_s * 1e3)}"
        return {"speed": f"{f'{rate:,.0f}' if rate >= 100 else f'{rate:.3g}'} {self.unit}/s{run}"}

    def _checkpoint(self) -> dict[str, str]:
        if not self.checkpoint_bytes:
            return {}
        nbytes, ms = self.checkpoint_bytes, self.checkpoint_bytes / DISK_BYTES_PER_S * 1e3
        return {"a checkpoint": f"{format_bytes(nbytes)}; training waits {_time(ms)} if the disk takes 1 GiB/s"}

    def _against(self, budget: str, totals: Mapping[str, int]) -> str:
        needed, limit = totals[budget], self.limits().get(budget)
        if limit is None:
            return format_bytes(needed)
        return f"{format_bytes(needed)} of {limit}: {'fits' if needed <= limit.nbytes else 'DOES NOT FIT'}"

    def write(self, run_dir: Path) -> None:
        """Writes plan.json into the run's directory, with the versions and the date of `provenance`."""
        text = json.dumps(self.as_dict() | provenance(), indent=2) + "\n"
        write_whole(run_dir / PLAN_FILE, text.encode())


def _copies(total: float, activations: float) -> str:
    return format_bytes(int(total)) + (
        f", of these activations {format_bytes(int(activations))}" if activations else ""
    )


def _in_brief(chosen: Mapping[str, str]) -> str:
    """Returns the choices that have a brief reason, each reason once."""
    by_reason: dict[str, list[str]] = {}
    for key, choice in chosen.items():
        if isinstance(choice, Choice):
            by_reason.setdefault(choice.brief, []).append(f"{key.rpartition('.')[2]} {choice.value}")
    return ", ".join(f"{', '.join(values)} ({reason})" for reason, values in by_reason.items())


def _time(ms: float) -> str:
    """Returns a time for people: 211 ms, 27.6 s, 34 minutes, 12.5 hours."""
    for unit, length_ms, below_ms in (("ms", 1, 1e3), ("s", 1e3, 120e3), ("minutes", 60e3, 7200e3)):
        if ms < below_ms:
            return f"{ms / length_ms:.3g} {unit}"
    return f"{ms / 3600e3:,.1f} hours"
