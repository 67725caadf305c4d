"""The settings of runs: which runs repeat each other, which run is the reference of another, and the runs' names."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from training.checkpoints.changes import SAME_OPTIMIZER
from training.comparison.runs import Run
from training.config.declare import AUTO, SETTLED
from training.runs.bounded_files import leaves_of
from training.visible_text import shortened

Settings = dict[str, Any]
"""by dotted key: every value as text, or a list of texts"""

# Keys in which runs of one row may differ: the seed that rows average over, and how they were started and recorded.
REPEATS = ("seed", "tracking", "resume", "force")
# Keys in which a run may differ from its reference, besides the mode.
INCIDENTAL = ("log_every", "eval.every", "sample", "trace", "checkpoint", "vram_budget", "host_budget")
# Keys that follow the number of devices.
OF_DEVICES = ("devices", "microbatches", "parallel")
# Keys of the update rule of AdamW; its other keys are of where and how it computes, and leave the rule the same.
UPDATE_RULE = tuple(f"optimizer.{key}" for key in ("lr", "betas", "eps", "weight_decay", "decay_norms_and_biases"))
# Values of keys that switch something off, as they stand in a run's configuration.
NOTHING = ("null", "false")
# Characters of a run's name; a value may be a text of any length.
LONGEST_NAME = 300


def all_settings(runs: Sequence[Run]) -> list[Settings]:
    """Returns the settings of each run, without the keys of REPEATS.

    If the runs used different devices, `device` is the name of the one that the run used.
    """
    values = [_without(dict(leaves_of(run.config)), REPEATS) for run in runs]
    # For a mode that recomputes blocks by itself, `recompute` changes nothing.
    values = [_without(own, ["recompute"]) if _recomputes_itself(own) else own for own in values]
    if len({run.device for run in runs if run.device}) > 1:
        return [own | {"device": run.device} if run.device else own for own, run in zip(values, runs, strict=True)]
    return values


def is_resident(values: Settings) -> bool:
    """Tells whether the mode leaves everything on the device, as offload=none does."""
    return str(values.get("offload._target_") or "").rpartition(".")[2] == "Resident"


def find_reference(values: Settings, candidates: Sequence[Settings]) -> int | None:
    """Returns the index of the candidate that `values` is to be compared with, or None if there is none.

    The reference is a resident run with the same settings except the mode. A mode that recomputes is compared with a
    resident run that recomputes, if there is one. If no resident run has the same optimizer, one with the same update
    rule is taken. A resident run on several devices is compared with the resident run on the fewest devices, and so is
    a run of another mode if no resident run has the same number of devices.
    """
    recompute = ("recompute",) if _recomputes_itself(values) else ()
    left_out = ("offload", *INCIDENTAL, *recompute)
    found = _alike(values, candidates, left_out)
    if not found or is_resident(values):
        order = [(_devices(own), own.get("microbatches") != values.get("microbatches")) for own in candidates]
        on_fewer = [i for i in _alike(values, candidates, (*left_out, *OF_DEVICES)) if order[i][0] < _devices(values)]
        found = sorted(on_fewer, key=order.__getitem__) or found
    recomputing = (i for i in found if recompute and candidates[i].get("recompute.blocks") == "true")
    return next(recomputing, next(iter(found), None))


def _alike(values: Settings, candidates: Sequence[Settings], left_out: Sequence[str]) -> list[int]:
    """Returns the resident candidates that equal `values` but for `left_out`, and for the optimizer if none do."""
    wanted = _without(values, left_out)
    others = {i: _without(other, left_out) for i, other in enumerate(candidates) if is_resident(other)}
    for comparable in (lambda own: own, _by_update_rule):
        if matches := [i for i, other in others.items() if comparable(other) == comparable(wanted)]:
            return matches
    return []


def name_runs(runs: Sequence[Run], values: Sequence[Settings]) -> list[str]:
    """Returns a name for each run: the mode, then KEY=VALUE of the settings in which it differs from other runs.

    The keys of an option are compared only among runs that chose the option. The mode's keys are written without
    `offload.`. A group or key that is switched off (`recompute=none`, `vram_budget=null`) is not named.
    """
    options = [_options(run, own) for run, own in zip(runs, values, strict=True)]
    names = []
    first: Settings = {}
    varied = {key for own in values for key, value in own.items() if first.setdefault(key, value) != value}
    for run, own, chosen in zip(runs, values, options, strict=True):
        keys = _differing_keys({key: own[key] for key in own if key in varied}, chosen, values, options)
        parts = [
            *([chosen["offload"]] if "offload" in chosen else []),
            *(key.removeprefix("offload.") for key in keys if key.startswith("offload.")),
            *_differing_options(chosen, options),
            *(key for key in keys if not key.startswith("offload.")),
        ]
        names.append(shortened(" ".join(parts) or run.directory.name, LONGEST_NAME))
    counts = Counter(names)
    return [f"{name} ({run.directory})" if counts[name] > 1 else name for name, run in zip(names, runs, strict=True)]


def in_common(runs: Sequence[Run]) -> list[str]:
    """Returns GROUP=OPTION and KEY=VALUE of the options, top-level keys and source that are the same in all `runs`."""
    values = all_settings(runs)
    options = _shared([_options(run, own) for run, own in zip(runs, values, strict=True)])
    shared = [f"{group}={option}" for group, option in options.items() if group != "offload"]
    shared += [
        f"{key}={_written(value)}"
        for key, value in _shared(values).items()
        if key == "model.source" or ("." not in key and key not in options)
    ]
    return [shortened(text, LONGEST_NAME) for text in shared]


def _written(value: Any) -> str:
    """Returns a value in the form that the command line takes."""
    return f"[{','.join(map(_written, value))}]" if isinstance(value, list) else str(value)


def _without(values: Settings, left_out: Iterable[str]) -> Settings:
    """Returns `values` without the keys in `left_out` and the keys below them."""
    left_out = tuple(left_out)
    below = tuple(f"{key}." for key in left_out)
    return {key: value for key, value in values.items() if key not in left_out and not key.startswith(below)}


def _by_update_rule(values: Settings) -> Settings:
    """Returns the settings with no more of AdamW than its update rule; another optimizer keeps its keys."""
    if values.get("optimizer._target_") not in SAME_OPTIMIZER:
        return values
    return {key: value for key, value in values.items() if key in UPDATE_RULE or not key.startswith("optimizer.")}


def _devices(values: Settings) -> int:
    count = str(values.get("devices"))
    return int(count) if count.isdecimal() and len(count) < 7 else 1


def _recomputes_itself(values: Settings) -> bool:
    return any(key.startswith("offload.") and key.endswith(".checkpoint") and values[key] == "true" for key in values)


def _options(run: Run, values: Settings) -> dict[str, str]:
    """Returns the option chosen of each configuration group, by the group's place in the configuration."""
    chosen = {}
    for group, option in run.choices.items():
        # GROUP@PLACE: a group that is used twice, as for the weights of a mode that swaps activations.
        place = group.partition("@")[2] or group
        if place == "offload" or any(key == place or key.startswith(f"{place}.") for key in values):
            chosen[place] = option
    return chosen


def _differing_options(chosen: dict[str, str], options: Sequence[dict[str, str]]) -> list[str]:
    def differs(place: str, option: str) -> bool:
        # The optimizer follows the mode.
        follows = [other for other in options if place != "optimizer" or other.get("offload") == chosen.get("offload")]
        return any(other.get(place, option) != option for other in follows if _same_above(place, chosen, other))

    named = {place: option for place, option in chosen.items() if place != "offload" and option not in ("none", AUTO)}
    return [f"{place.removeprefix('offload.')}={option}" for place, option in named.items() if differs(place, option)]


def _differing_keys(
    own: Settings, chosen: dict[str, str], values: Sequence[Settings], options: Sequence[dict[str, str]]
) -> list[str]:
    """Returns KEY=VALUE of the keys whose value differs in a run that chose the same options above the key."""
    named = []
    for key, value in own.items():
        if key.endswith("._target_") or key in chosen or value in NOTHING or SETTLED.get(key) == value:
            continue
        # A key that only some runs have comes from another version of the program, not from another experiment.
        same = (value, SETTLED.get(key, value))
        others = [them for other, them in zip(values, options, strict=True) if other.get(key, value) not in same]
        if any(_same_above(key, chosen, them) for them in others):
            named.append(f"{key}={_written(value)}")
    return named


def _same_above(key: str, chosen: dict[str, str], other: dict[str, str]) -> bool:
    """Returns True if two runs chose the same option of every group that contains `key`."""
    above = [place for place in chosen.keys() | other.keys() if key.startswith(f"{place}.")]
    return all(chosen.get(place) == other.get(place) for place in above)


def _shared(nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the items that all nodes share, empty nodes aside."""
    first, *others = [node for node in nodes if node] or [{}]
    return {key: value for key, value in first.items() if all(other.get(key, ...) == value for other in others)}
