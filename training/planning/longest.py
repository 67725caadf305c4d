"""seq_len=max: the longest sequence that fits, found by plans of a few lengths.

Bytes are near affine in the length, so two plans tell where the limit is; two more show that a length fits, and the
next does not. It takes more where bytes are not: a budget is filled, or masks grow with the square of the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from omegaconf import DictConfig
from torch import nn

from offload.planning import MemoryTracker
from training.config.declare import AUTO, LONGEST
from training.config.rates import Choice
from training.errors import UserError
from training.metrics.progress import phase
from training.planning.dry_step import count_forward
from training.planning.fit import shortfalls
from training.planning.machine import Machine, machine_of
from training.planning.notes import FOREIGN
from training.planning.plan import UNPLANNED, Steps, plan_filled
from training.planning.report import RunPlan
from training.runs.invocation import Invocation
from training.settle.components import Components, recomputes
from training.settle.tiles import usual_tile

# Lengths are multiples of FINE, and from COARSE_FROM tokens on of COARSE.
FINE, COARSE, COARSE_FROM = 256, 1024, 16384
# The first length that is tried, the factor to the next, and the longest.
START, GROWTH, MOST_TOKENS = 8192, 8, 2**24
# The forward of twice FEW tokens has so many times the operations of FEW where each token has operations of its own.
FEW, LOOPS = 64, 1.5
# Plans at most, and after how many an interval is halved, not cut by a line.
MOST_PLANS, BY_LINES = 24, 8


@dataclass(frozen=True)
class Longest:
    """The longest sequence: what is `chosen` by key, and the `reasons` why it is no longer, and why it is in tiles.

    `invocation` is that of the same run with this length; `machine`, `model` and `steps` spare making them again.
    """

    chosen: Mapping[str, int]
    reasons: Mapping[str, Choice]
    invocation: Invocation
    machine: Machine
    model: nn.Module
    steps: Steps

    @classmethod
    def of(cls, config: DictConfig, invocation: Invocation, device: torch.device, on_gpu: bool) -> Longest:
        """Finds it for the run that `config` describes, which stays as it is.

        Its blocks compute in tiles unless `recompute.tile` says otherwise: then it is longer. Raises UserError as a
        plan does, and where the run has no sequences, no limit is known, or bytes are not.
        """
        steps: Steps = {}
        config = config.copy()

        def components(tokens: int, model: nn.Module | None = None) -> Components:
            some = config.copy()
            some.seq_len = tokens
            return Components.of(some, invocation, device, on_gpu=on_gpu, model=model)

        # All that a length may be refused for, it is refused for later.
        divisor = config.parallel.sequence
        first = components(divisor)
        if first.task.unit != "tokens":
            asked = f"seq_len={LONGEST}: task={invocation.choices['task']} trains on {first.task.unit}"
            raise UserError(f"{asked}, which have no seq_len: leave it out")
        if first.mode.foreign:
            raise UserError(f"seq_len={LONGEST}: {FOREIGN}: give a number")
        of_model = min(_most_tokens(first) or MOST_TOKENS, MOST_TOKENS)
        few = min(FEW, of_model // 2 // divisor) * divisor
        one, two = (_operations(components(tokens, first.model)) if few else 0 for tokens in (few, 2 * few))
        if two > LOOPS * one:
            raise UserError(
                f"seq_len={LONGEST}: the model computes one token after another, as Mamba without its kernels, so plans"
                " of long sequences take minutes: give a number"
            )
        tile = None
        if config.recompute.tile == AUTO and (recomputes(first.config) or first.mode.recomputes):
            config.recompute.tile = tile = usual_tile(first.mode, first.model)
        with phase("measuring the machine"):
            machine = machine_of(first)
        plans: dict[int, RunPlan] = {}

        def excess(tokens: int) -> dict[str, int]:
            found = components(tokens, first.model)
            plans[tokens] = plan = plan_filled(found, machine, machine.vram_gib is not None, steps)[1]
            if unplanned := [note for note in plan.notes if note.startswith(UNPLANNED)]:
                raise UserError(f"seq_len={LONGEST}: {unplanned[0]}: give a number")
            return {key: plan.totals[key] - limit.nbytes for key, limit in plan.limits().items()}

        with phase("looking for the longest sequence"):
            low, high = bounds(excess, of_model, divisor)
        if high is not None:
            short = shortfalls(plans[high].totals, plans[high].exceeded())
            why = Choice.of(low or high, f"{high} does not fit ({short})", "longest")
        else:
            ends = "no longer one is tried" if of_model == MOST_TOKENS else "the model has no more positions"
            why = Choice.of(low, ends, "longest")
        chosen, reasons = {"seq_len": low or high}, {"seq_len": why}
        if tile is not None:
            chosen["recompute.tile"] = tile
            reasons["recompute.tile"] = Choice.of(tile, "more tokens fit: give it to the run too", "longest")
        others = (each for each in invocation.overrides if each.partition("=")[0] not in chosen)
        invocation = replace(invocation, overrides=(*others, *(f"{key}={value}" for key, value in chosen.items())))
        return cls(chosen, reasons, invocation, machine, first.model, steps)


def _operations(components: Components) -> int:
    """Returns the number of operations that take time in the forward of a sequence.

    After an error, of which plans tell, it is those before.
    """
    spent: list[tuple] = []
    with suppress(Exception):
        count_forward(components, MemoryTracker(lambda *work: spent.append(work)))
    return len(spent)


def bounds(excess: Callable[[int], Mapping[str, int]], most: int, divisor: int = 1) -> tuple[int, int | None]:
    """Returns the longest length that fits (0: none) and the shortest that does not (None: `most` fits).

    `excess` returns how many bytes a length is over each limit, below 0 for room. Lengths are multiples of `divisor`.
    Raises UserError without a limit.
    """
    fine, coarse = math.lcm(FINE, divisor), math.lcm(COARSE, divisor)

    def multiple(tokens: int, more: int = 0) -> int:
        unit = fine if tokens < COARSE_FROM else coarse
        return (tokens // unit + more) * unit

    tried: dict[int, Mapping[str, int]] = {}
    most = most // divisor * divisor
    low, high, tokens = 0, None, min(multiple(START), most)
    while len(tried) < MOST_PLANS:
        tried[tokens] = found = excess(tokens)
        if not found:
            raise UserError(f"seq_len={LONGEST}: no memory is known that bounds it: give vram_budget or host_budget")
        low, high = (low, tokens) if max(found.values()) > 0 else (tokens, high)
        above = min(multiple(low, more=1), most)
        if low == most or (high is not None and above >= high):
            break
        below = min(low * GROWTH, most) if high is None else max(multiple(high - 1), above)
        tokens = min(max(multiple(_guess(tried, low, below)), above), below)
    return low, high


def _guess(tried: Mapping[int, Mapping[str, int]], low: int, below: int) -> int:
    """Returns a length between `low` and `below` where a limit may be."""
    if len(tried) == 1:
        return below if low else below // GROWTH
    if len(tried) > BY_LINES:
        return (low + below) // 2
    (one, before), (two, after) = list(tried.items())[-2:]
    slopes = {key: (after[key] - before[key]) / (two - one) for key in after}
    return int(min((two - after[key] / slope for key, slope in slopes.items() if slope > 0), default=below))


def _most_tokens(components: Components) -> int | None:
    """Returns the most tokens of a row that the model takes, as `check_model` of its task has it; None for any."""
    kind = "most_packed" if components.config.dataset.get("packed") else "most_positions"
    return getattr(components.model, kind, None)
