"""What a run was set to: which runs repeat each other, which is the reference of which, and what to call them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from training.comparison.runs import Run

Settings = dict[str, Any]

# What makes no other run of a run: where it is recorded, and what its seeds are averaged over.
REPEATS = ("seed", "tracking", "resume")
# What may differ from the run that a mode is measured against, besides the mode.
INCIDENTAL = ("log_every", "trace", "trace_step", "checkpoint", "vram_budget", "host_budget")
# Where and how the optimizer computes; its rule stays the same.
PLACEMENT = (
    "optimizer._target_",
    "optimizer.state_dtype",
    "optimizer.device_share",
    "optimizer.threads",
    "optimizer.compile",
)
ABSENT = object()


def all_settings(runs: Sequence[Run]) -> list[Settings]:
    """The values of each run's configuration by dotted key, what its repetitions may differ in left out.

    Where the runs used several devices, `device` is the one that a run had, whatever it asked for; else nobody wants to
    know, and a run that ended before it wrote down its hardware is as the others.
    """
    values = [_settings(run) for run in runs]
    if len({run.device for run in runs if run.device}) > 1:
        return [own | {"device": run.device} if run.device else own for own, run in zip(values, runs, strict=True)]
    return values


def is_resident(values: Settings) -> bool:
    """Whether these are settings of the reference mode, under which everything stays on the device."""
    return _target(values).rpartition(".")[2] == "Resident"


def find_reference(values: Settings, candidates: Sequence[Settings]) -> int | None:
    """Which of `candidates` is the resident run that `values` is to be compared with; None where there is none.

    It has the same settings but for the mode. A mode that computes blocks again by itself is compared with a resident
    run that does so, rather than with one that does not; and where no resident run has the same optimizer, one whose
    optimizer follows the same rule on the device will do.
    """
    recompute = ("recompute",) if _recomputes_itself(values) else ()
    for beyond in ((), PLACEMENT):
        left_out = ("offload", *INCIDENTAL, *recompute, *beyond)
        wanted = _without(values, left_out)
        same = [i for i, other in enumerate(candidates) if _without(other, left_out) == wanted]
        matches = [i for i in same if is_resident(candidates[i])]
        if matches:
            return next((i for i in matches if recompute and _recomputes(candidates[i])), matches[0])
    return None


def describe(runs: Sequence[Run], values: Sequence[Settings]) -> list[str]:
    """A name for each of `runs`, of what distinguishes its settings from the others': the mode, then KEY=VALUE.

    Keys of an option are named among runs that have chosen this option only, the mode's without `offload.`. Groups of
    which nothing is chosen (`recompute=none`) go without saying.
    """
    options = [_options(run, own) for run, own in zip(runs, values, strict=True)]
    names = []
    for index, run in enumerate(runs):
        knobs, others = _differing_keys(index, values, options)
        mode = [options[index]["offload"]] if "offload" in options[index] else []
        names.append(" ".join([*mode, *knobs, *_differing_options(index, options), *others]) or run.directory.name)
    counts = Counter(names)
    return [f"{name} ({run.directory})" if counts[name] > 1 else name for name, run in zip(names, runs, strict=True)]


def in_common(runs: Sequence[Run], values: Sequence[Settings]) -> list[str]:
    """GROUP=OPTION and KEY=VALUE of what is the same in all `runs`: the options, and the keys at the top level."""
    options = _shared([_options(run, own) for run, own in zip(runs, values, strict=True)])
    shared = [f"{group}={option}" for group, option in options.items() if group != "offload"]
    return shared + [f"{key}={show(value)}" for key, value in _shared(values).items() if _is_top(key, options)]


def show(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(show, value))}]"
    return "null" if value is None else str(value)


def _settings(run: Run) -> Settings:
    values = _without(dict(_flat(run.config)), REPEATS)
    # A mode that computes blocks again by itself does so once, whatever else is asked for.
    return _without(values, ["recompute"]) if _recomputes_itself(values) else values


def _flat(node: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _without(values: Settings, left_out: Iterable[str]) -> Settings:
    """`values` but for the keys in `left_out`, and all below these."""
    left_out = tuple(left_out)
    below = tuple(f"{key}." for key in left_out)
    return {key: value for key, value in values.items() if key not in left_out and not key.startswith(below)}


def _target(values: Settings) -> str:
    """The class of the mode with its module, empty where the configuration names none."""
    return str(values.get("offload._target_") or "")


def _recomputes(values: Settings) -> bool:
    # An option without keys is an empty dict, which `_flat` keeps; one with keys has them below its name.
    return any(key.startswith("recompute.") for key in values)


def _recomputes_itself(values: Settings) -> bool:
    return any(key.startswith("offload.") and key.endswith(".checkpoint") and values[key] is True for key in values)


def _options(run: Run, values: Settings) -> dict[str, str]:
    """The option chosen of each group of the configuration that tells runs apart, by the group's place."""
    chosen = {}
    for group, option in run.choices.items():
        # GROUP@PLACE where a group is used a second time, as for the weights of a mode that swaps activations.
        place = group.partition("@")[2] or group
        if place == "offload" or any(key == place or key.startswith(f"{place}.") for key in values):
            chosen[place] = option
    if "offload" not in chosen and _target(values):
        # Its module is called as the option is.
        chosen["offload"] = _target(values).split(".")[-2:][0]
    if "recompute" not in chosen and _without(values, ["recompute"]) != values:
        chosen["recompute"] = "block" if _recomputes(values) else "none"
    return dict(sorted(chosen.items(), key=lambda item: item[0] != "offload"))


def _differing_options(index: int, options: Sequence[dict[str, str]]) -> list[str]:
    own = options[index]
    return [
        f"{_short(place)}={option}"
        for place, option in own.items()
        if place != "offload"
        and option != "none"
        and any(other.get(place, option) != option for other in options if _alike(place, own, other))
    ]


def _differing_keys(
    index: int, values: Sequence[Settings], options: Sequence[dict[str, str]]
) -> tuple[list[str], list[str]]:
    """KEY=VALUE of the mode, and of all else."""
    own = options[index]
    knobs, others = [], []
    for key, value in values[index].items():
        if key.endswith("._target_") or key in own:
            continue
        peers = [other for other, chosen in zip(values, options, strict=True) if _alike(key, own, chosen)]
        # A key that another run does not have is one of another version, not of another experiment.
        if any(other.get(key, value) != value for other in peers):
            (knobs if key.startswith("offload.") else others).append(f"{_short(key)}={show(value)}")
    return knobs, others


def _alike(key: str, own: dict[str, str], other: dict[str, str]) -> bool:
    """Whether two runs have chosen the same of every group that `key` lies in."""
    above = [place for place in own.keys() | other.keys() if key.startswith(f"{place}.")]
    return all(own.get(place) == other.get(place) for place in above)


def _is_top(key: str, options: dict[str, str]) -> bool:
    return "." not in key and key not in options


def _short(key: str) -> str:
    return key.removeprefix("offload.")


def _shared(nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all have that have anything."""
    first, *others = [node for node in nodes if node] or [{}]
    return {key: value for key, value in first.items() if all(other.get(key, ABSENT) == value for other in others)}
