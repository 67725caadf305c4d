"""Tells which share of the weights an offload mode streams, and names the largest that it leaves on the device."""

from __future__ import annotations

from fnmatch import fnmatchcase

from offload import WeightMode, format_bytes
from training.config.modes import weights_node
from training.settle.components import Components

# A smaller share is worth a note.
MOST = 0.9
# The most tensors, or modules, that are named, and the least share of the bytes of a tensor that is.
NAMED, SMALL = 3, 0.01


def streamed_share(components: Components) -> float | None:
    """Returns the share of the bytes of parameters and buffers that stream; None for a mode that streams none."""
    footprint = components.footprint
    everything = footprint.host_weight_bytes + footprint.resident_bytes
    return footprint.host_weight_bytes / everything if footprint.units and everything else None


def staying_note(components: Components) -> str | None:
    """Returns a line with the largest tensors that stay on the device, where more stays than the user asked for.

    Where the user's patterns leave nothing that streams, the line says so.
    """
    share = streamed_share(components)
    key, mode = weights_node(components.config)
    weights = _weight_mode(components)
    if weights is not None and not weights.chosen(components.model):
        patterns = f"{key}.include={mode.include} and {key}.exclude={mode.exclude}"
        return f"nothing streams: {patterns} leave no module of the model"
    if share is None or share >= MOST or mode.get("resident") not in (None, 0, "0", "auto"):
        return None
    names = {id(t): name for name, t in (*components.model.named_parameters(), *components.model.named_buffers())}
    footprint = components.footprint
    worth = SMALL * (footprint.host_weight_bytes + footprint.resident_bytes)
    # What trains stays by choice then.
    others = (t for t in footprint.resident if not (t.requires_grad and mode.get("trained") == "device"))
    largest = sorted((t for t in others if t.nbytes >= worth), key=lambda t: -t.nbytes)[:NAMED]
    if not largest:
        return None
    shown = ", ".join(f"{names.get(id(tensor), 'a tensor')} ({format_bytes(tensor.nbytes)})" for tensor in largest)
    advice = f"; {key}.outside=stream streams them too" if mode.get("outside") == "resident" else ""
    return f"{1 - share:.0%} of the weights stay on the device: {shown}{advice}"


def unmatched_note(components: Components) -> str | None:
    """Returns a line with the patterns of `include` and `exclude` that match no module which the mode cuts out.

    They are not refused: under another mode of a sweep they may match. None where all match, or where the patterns
    leave nothing that streams, which `staying_note` tells.
    """
    weights = _weight_mode(components)
    if weights is None or not weights.chosen(components.model):
        return None
    names = list(dict.fromkeys(point.name for point in weights.cut_points(components.model)))
    unmatched = [
        f"{key}={pattern}"
        for key, patterns in (("include", weights.include), ("exclude", weights.exclude))
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if not unmatched:
        return None
    prefix, _ = weights_node(components.config)
    some = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    listed = ", ".join(f"{prefix}.{pattern}" for pattern in unmatched)
    return f"without effect: {listed}; the modules that the mode cuts out are {some}"


def _weight_mode(components: Components) -> WeightMode | None:
    weights = getattr(components.mode, "weights", components.mode)
    return weights if isinstance(weights, WeightMode) else None
