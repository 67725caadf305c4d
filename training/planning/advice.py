"""Advice for a run that needs too much memory, or whose gradients are not finite: overrides that it can take.

Changes are tried as plans, those that cost least first, until the run fits; then each that it fits without is left out
again. So what is advised is enough, and nothing is named that is not.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from offload import ActivationMode
from offload.knobs import GIB, format_bytes, parse_bytes
from training.checkpoints.changes import MAY_CHANGE
from training.config.adapter import has_adapter
from training.config.declare import AUTO
from training.config.modes import weights_node
from training.config.schema import OnNonfinite, Precision, chosen_format, quantises
from training.config.validation import check
from training.errors import UserError
from training.metrics.progress import phase
from training.parallel.world import row_shares
from training.planning.dry_step import examples_of_microbatch, examples_of_rank
from training.planning.machine import with_rate
from training.planning.memory import UNDO_LOG
from training.planning.plan import PlannedStep, plan_filled
from training.planning.report import Limit, RunPlan
from training.settle.components import Components, recomputes
from training.settle.missing_abilities import without_abilities
from training.settle.tiles import tokens_of_microbatch, usual_tile

# Pieces of advice on gradients that are not finite.
MOST = 3
# Dry runs of a search: each takes some seconds of a processor for a model of 7B.
MOST_RUNS = 6
# The share of a limit that a change must save to be tried, and to be kept.
LEAST_SHARE = 0.01
# The share of a GPU that a budget leaves to CUDA itself and to memory that the allocator cannot use.
LEFT_SHARE = 1 / 16
# What is lost besides speed, by override.
COSTS = {
    "precision=bf16": "weights and compute in bf16",
    "optimizer.state_dtype=bf16": "moments within 2^-9 of their size",
    "clip_norm=null": "gradients are not clipped",
    "optimizer.state_dtype=int8": "moments in 8 bits, within 0.7% of the largest of 256",
    "optimizer.master=stochastic": "no float32 masters: weights are rounded at random",
    "quantize=int8": "frozen weights in 8 bits",
    "quantize=nf4": "frozen weights in 4 bits",
    "batch_size": "smaller batches",
    "seq_len": "shorter sequences",
}
KEYS_OF_MODEL = {"precision", "quantize"}

Exceeded = Callable[[Components, RunPlan], Mapping[str, Limit]]


@dataclass(frozen=True)
class Change:
    """Overrides of the command line, by key, and the budgets whose shortage they may help against."""

    overrides: Mapping[str, str]
    helps: tuple[str, ...]

    def __str__(self) -> str:
        return in_words(self.overrides)

    @property
    def costs(self) -> list[str]:
        """What is lost besides speed."""
        named = (COSTS.get(f"{key}={value}") or COSTS.get(key) for key, value in self.overrides.items())
        return [cost for cost in named if cost]


def memory_advice(components: Components, plan: RunPlan, exceeded: Exceeded) -> str:
    """Returns in words the overrides with which the run fits, what they cost, and what is planned with them.

    `exceeded` gives the limits that a planned run exceeds, by the key of the budget.
    """
    with phase("looking for changes with which it fits"):
        trials = _Trials(components, plan)
        taken, found = _search(trials, (components, plan), exceeded)
    best, short = found[1], exceeded(*found)
    if short:
        needed = " and ".join(f"{format_bytes(best.totals[key])} of {key}" for key in short)
        tried = f": even {in_words(_merged(taken))} needs {needed}" if taken else ""
        return f"a smaller model, or more memory{tried}"
    sizes = [format_bytes(best.totals["vram_budget"]) + " of the GPU"] if best.has_gpu else []
    # Its logs take what is left.
    host = best.totals["host_budget"] - best.host_bytes.get(UNDO_LOG, 0)
    sizes.append(format_bytes(host) + " of the host")
    speed = f"a step of {best.forecast.step_ms:,.0f} ms in place of {plan.forecast.step_ms:,.0f}"
    overrides = _merged(taken)
    costs = [f"{key}={value}: {cost}" for key, value in overrides.items() for cost in Change({key: value}, ()).costs]
    return f"{in_words(overrides)} (planned: {', '.join([*sizes, speed])}{''.join(f'; {cost}' for cost in costs)})"


def nonfinite_advice(config: DictConfig) -> str:
    """Returns overrides against gradients that are not finite, three at most, in words."""
    advice = {}
    if config.optimizer.lr > 0:
        advice["optimizer.lr"] = f"{config.optimizer.lr / 10:g}"
    if config.clip_norm is None:
        advice["clip_norm"] = "1"
    warmup = min(config.steps // 10, 1000)
    if config.schedule.warmup < warmup:
        advice["schedule.warmup"] = str(warmup)
    advice["on_nonfinite"] = "skip"
    *first, last = [f"{key}={value}" for key, value in advice.items() if _may_change(config, {key: value})][:MOST]
    return f"{', '.join(first)} or {last}" if first else last


def in_words(overrides: Mapping[str, str]) -> str:
    """Returns overrides as they are written on a command line."""
    return " ".join(f"{key}={value}" for key, value in overrides.items())


def _merged(changes: Sequence[Change]) -> dict[str, str]:
    return {key: value for change in changes for key, value in change.overrides.items()}


@dataclass
class _Trials:
    """Plans the run of `before` with changes. A dry run is made once for all plans that it is the same for."""

    before: Components
    plan: RunPlan
    _steps: dict[tuple, PlannedStep] = field(default_factory=dict)
    _models: dict[str, nn.Module] = field(default_factory=dict)
    _planned: dict[str, tuple[Components, RunPlan]] = field(default_factory=dict)

    @property
    def are_over(self) -> bool:
        """True if no further dry run is worth the wait."""
        return len(self._steps) >= MOST_RUNS

    def components(self, changes: Sequence[Change]) -> Components | None:
        """Returns the components of the run with `changes`; None if it is refused."""
        overrides, before = _merged(changes), self.before
        if not _may_change(before.config, overrides):
            return None
        of_model = in_words({key: value for key, value in overrides.items() if key in KEYS_OF_MODEL})
        try:
            config, invocation = before.invocation.composed_with(overrides)
            # torchrun's.
            config.devices, config.parallel.hosts = before.config.devices, before.config.parallel.hosts
            check(config)
            # Not that of `before`: after a failure it has memory.
            made = {"on_gpu": self.plan.has_gpu, "model": self._models.get(of_model)}
            found = Components.of(config, invocation, before.device, **made)
            self._models[of_model] = found.model
            return found.with_config(*without_abilities(config, found.mode))
        except (UserError, ValueError, HydraException, OmegaConfBaseException):
            return None

    def planned(self, changes: Sequence[Change]) -> tuple[Components, RunPlan] | None:
        """Returns components and plan of the run with `changes`; None if it is refused."""
        words = in_words(_merged(changes))
        if words not in self._planned:
            components = self.components(changes)
            if components is None:
                return None
            try:
                machine = with_rate(self.plan.machine, components)
                found = plan_filled(components, machine, self.plan.has_gpu, self._steps)
            except UserError:
                return None
            self._planned[words] = found
        return self._planned[words]


def _search(
    trials: _Trials, start: tuple[Components, RunPlan], exceeded: Exceeded
) -> tuple[list[Change], tuple[Components, RunPlan]]:
    """Returns the changes with which the run exceeds nothing, or as little as was found, with their plan."""
    taken, refused, at, ever_short = [], set(), start, set()
    while (short := exceeded(*at)) and not trials.are_over:
        chosen, ever_short = [], ever_short | set(short)
        for key, limit in short.items():
            for change in _changes(*at, key, limit.nbytes):
                if key in change.helps and str(change) not in refused and change not in chosen:
                    if trials.components([*taken, change]) is not None:
                        chosen.append(change)
                        break
                    refused.add(str(change))
        if not chosen:
            break
        found = trials.planned([*taken, *chosen])
        if found is None or not any(
            at[1].totals[key] - found[1].totals[key] >= LEAST_SHARE * limit.nbytes for key, limit in short.items()
        ):
            refused |= set(map(str, chosen))
            continue
        taken, at = [*taken, *chosen], found
    if not short:
        # First those that cost more than speed. What alone helps against a shortage is needed.
        for change in sorted(taken, key=lambda change: not change.costs):
            rest = [each for each in taken if each is not change]
            needed = ever_short.intersection(change.helps) - {key for each in rest for key in each.helps}
            if not needed and not trials.are_over and (found := trials.planned(rest)) and not exceeded(*found):
                taken, at = rest, found
    return taken, at


def _changes(components: Components, plan: RunPlan, key: str, limit: int) -> Iterator[Change]:
    """Yields changes that the run does not have yet, the cheapest first, against a shortage of `key`.

    First come those that leave the numbers as they are, but for the order of sums.
    """
    config, footprint, mode = components.config, components.footprint, components.mode
    weights_key, weights = weights_node(config)
    optimizer = config.optimizer
    host, device = ("host_budget",), ("vram_budget" if plan.has_gpu else "host_budget",)
    both = (*host, *device)
    moves_out = plan.host_bytes["activations"] >= LEAST_SHARE * limit
    given, worth = components.invocation.overridden, LEAST_SHARE * limit

    if plan.has_gpu and key == "vram_budget" and parse_bytes(key, config.vram_budget or 0) > limit:
        yield Change({"vram_budget": _budget(limit)}, device)
    if plan.has_gpu and key == "host_budget" and config.vram_budget is None and optimizer.get("device_share") == AUTO:
        # What then is on the device is not on the host.
        vram = (plan.budgets["vram_budget"] or 0) * (1 - LEFT_SHARE)
        if footprint.trained and plan.totals[key] - limit <= vram - plan.totals["vram_budget"]:
            yield Change({"vram_budget": _budget(vram)}, host)
    if footprint.trained and not components.updates_overlap and "adapter" not in given:
        yield Change({"optimizer": "host_adamw"}, both)
    if optimizer.get("gradients") == "keep":
        yield Change({"optimizer.gradients": "release"}, host)
    if plan.kept_bytes:
        yield Change({"offload.budget": "0"}, device)
    if f"{weights_key}.resident" in given and str(weights.resident) != "0":
        yield Change({f"{weights_key}.resident": "0"}, device)
    if optimizer.get("device_share") not in (None, 0, "0", AUTO):
        yield Change({"optimizer.device_share": "0"}, device)
    count, suffices = _microbatches(components, plan, key, limit)
    finer = Change({"microbatches": str(count)}, (key,))
    may_be_finer = count > config.microbatches and not footprint.layer_major
    if may_be_finer and suffices:
        yield finer
    again = Change({"recompute": "block"}, both if moves_out else device)
    keeps = not (recomputes(config) or mode.recomputes)
    may_suffice = plan.totals[key] - plan.device_bytes["activations"] < limit
    if keeps and may_suffice:
        yield again
    tile = None if keeps or config.recompute.tile is not None else usual_tile(mode, components.model)
    if tile is not None and tokens_of_microbatch(config, components.task) > tile:
        yield Change({"recompute.tile": str(tile)}, device)
    moves = isinstance(mode, ActivationMode)
    if not footprint.units:
        for name in ("layer_stream", "bounce_linear"):
            yield Change({"offload": f"{name}_swap" if moves else name}, device)
    if keeps and not may_suffice:
        yield again
    if weights.get("outside") == "resident" and footprint.resident_bytes >= worth:
        yield Change({f"{weights_key}.outside": "stream"}, device)
    if weights.get("slots", 1) > 1 and footprint.slot_bytes >= worth:
        yield Change({f"{weights_key}.slots": "2" if weights.slots > 2 else "1"}, device)
    if footprint.units and not moves and plan.has_gpu and plan.device_bytes["activations"] >= worth:
        yield Change({"offload": "layer_stream_swap"}, device)
    if has_adapter(config) and config.model.weights is not None and weights.get("source") == "memory":
        yield Change({f"{weights_key}.source": "mapped"}, host)
    if may_be_finer and not suffices:
        yield finer
    yield from _lossy(components, plan, both, host, worth)


def _lossy(
    components: Components, plan: RunPlan, both: tuple[str, ...], host: tuple[str, ...], worth: float
) -> Iterator[Change]:
    """Yields changes of the numbers, or of what is trained on."""
    config, optimizer = components.config, components.config.optimizer
    if config.precision == Precision.fp32:
        yield Change({"precision": "bf16"}, both)
    if has_adapter(config):
        for form in ("int8", "nf4"):
            if not quantises(config) or (chosen_format(config)[0], form) == ("int8", "nf4"):
                yield Change({"quantize": form}, both)
    states = plan.host_bytes["optimizer"] + plan.device_bytes["optimizer"]
    has_formats = states >= worth and "state_dtype" in optimizer
    where = both if plan.device_bytes["optimizer"] >= worth else host
    if has_formats and optimizer.state_dtype == "fp32":
        yield Change({"optimizer.state_dtype": "bf16"}, where)
    whole = config.microbatches == 1 or components.footprint.layer_major
    summed_inside = config.devices == 1 or components.shares_homes
    releases = (
        summed_inside
        and config.on_nonfinite == OnNonfinite.stop
        and optimizer.get("gradients") == AUTO
        and plan.host_bytes["gradients"] >= worth
    )
    if releases and whole and config.clip_norm is not None:
        yield Change({"clip_norm": "null"}, host)
    if has_formats and optimizer.state_dtype == "bf16":
        yield Change({"optimizer.state_dtype": "int8"}, where)
    if has_formats and optimizer.master == "compact" and config.precision == Precision.bf16:
        yield Change({"optimizer.master": "stochastic"}, where)
    if releases and not whole:
        # Gradients that are added to none of another microbatch need no home either.
        one = {"microbatches": "1", "batch_size": str(examples_of_microbatch(config))}
        yield Change({"clip_norm": "null", **one}, host)
    where = both if plan.host_bytes["activations"] >= worth else both[1:]
    if examples_of_rank(config) > 1 and components.footprint.layer_major:
        yield Change({"batch_size": str(max(config.batch_size // 2, row_shares(config)))}, where)
    if components.task.unit == "tokens" and config.seq_len > 1:
        yield Change({"seq_len": str(config.seq_len // 2)}, where)


def _microbatches(components: Components, plan: RunPlan, key: str, limit: int) -> tuple[int, bool]:
    """Returns a number of microbatches, of equal sizes, and whether their smaller activations may suffice."""
    config, most = components.config, examples_of_rank(components.config)
    on_device = key == "vram_budget" or not plan.has_gpu
    moving = plan.device_bytes["activations"] - plan.kept_bytes if on_device else plan.host_bytes["activations"]
    room = limit - (plan.totals[key] - moving)
    if moving < LEAST_SHARE * limit:
        return config.microbatches, False
    if not 0 < room < moving:
        return most, False
    count = math.ceil(config.microbatches * moving / room)
    return next((number for number in range(count, most) if most % number == 0), most), count <= most


def _budget(nbytes: float) -> str:
    """Returns a budget as a user writes it, rounded down."""
    return f"{int(10 * nbytes / GIB) / 10:g}GiB" if nbytes >= GIB else str(int(nbytes))


def _may_change(config: DictConfig, overrides: Mapping[str, str]) -> bool:
    """Tells whether a run that resumes may take the overrides; a new run may take all."""
    if config.resume is None:
        return True
    return all(any(fnmatchcase(f"{name}{end}", may) for may in MAY_CHANGE for end in ("", ".")) for name in overrides)
