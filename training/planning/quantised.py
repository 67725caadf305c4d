"""Tells which share of the weights is quantised, and names the largest that are not."""

from __future__ import annotations

from models.quantise import QuantisedWeight
from offload import format_bytes
from training.config.quantize import quantises
from training.planning.streamed import MOST, NAMED, SMALL
from training.settle.components import Components


def unquantised_note(components: Components) -> str | None:
    """Returns a line with the largest weights that are not quantised, where they are more than a tenth.

    Bytes are those in the precision of the run. None where nothing is quantised, or the user chose the layers.
    """
    config = components.config
    if not quantises(config) or config.quantize.include or config.quantize.exclude or config.quantize.blocks:
        return None
    sizes = {name: (each.numel() * each.dtype.itemsize, each) for name, each in components.model.named_parameters()}
    everything = sum(nbytes for nbytes, _ in sizes.values())
    left = {name: nbytes for name, (nbytes, each) in sizes.items() if not isinstance(each, QuantisedWeight)}
    if sum(left.values()) <= (1 - MOST) * everything:
        return None
    largest = sorted((name for name in left if left[name] >= SMALL * everything), key=left.get, reverse=True)[:NAMED]
    shown = ", ".join(f"{name} ({format_bytes(left[name])})" for name in largest)
    share = sum(left.values()) / everything
    return f"{share:.0%} of the weights, in bytes without quantising, are not quantised{': ' if shown else ''}{shown}"
