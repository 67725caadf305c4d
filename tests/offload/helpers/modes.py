"""Every mode of offload/modes, found by its file: a new one is in the tests without a line in them."""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

from torch import nn

import offload.modes
from offload.activations.checkpointing import recompute
from offload.modes.activation_mode import ActivationMode
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import NO_OPTIONS, Attached, AttachOptions, Mode
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.streams.registry import Streams

# Values of knobs with which a mode moves something of a model of a few kilobytes.
SMALL_KNOBS = {"shards": 2}
# Modes for the weights, below one that moves activations.
WEIGHTS = {
    "resident": Resident,
    "layer_stream": lambda: LayerStream(slots=2),
    "bounce_linear": lambda: BounceLinear(slots=1),
    "shard_offload": lambda: ShardOffload(shards=2, checkpoint=False),
    "shard_offload recomputing": lambda: ShardOffload(shards=2, slots=1),
}


def mode_classes() -> dict[str, type[Mode]]:
    """Returns the modes that can be made, by the names of their files."""
    classes = {}
    for path in sorted(Path(offload.modes.__file__).parent.glob("*.py")):
        module = importlib.import_module(f"offload.modes.{path.stem}")
        for found in vars(module).values():
            is_own = inspect.isclass(found) and issubclass(found, Mode) and found.__module__ == module.__name__
            if is_own and found is not Mode and not inspect.isabstract(found):
                classes[path.stem] = found
    return classes


def small(name: str) -> Mode:
    """Makes a mode with its defaults, but for knobs by which it moves something of a small model."""
    found = mode_classes()[name]
    weights = (Resident(),) if issubclass(found, ActivationMode) else ()
    knobs = {knob: value for knob, value in SMALL_KNOBS.items() if knob in found.__dataclass_fields__}
    return found(*weights, **knobs)


def recomputing(mode: Mode, blocks_of: Callable[[nn.Module], list[nn.Module]] | None = None) -> Mode:
    """Makes `mode` recompute blocks once it has attached, as the training loop does.

    They are the `blocks` of the model, unless the mode recomputes these itself.
    """
    if blocks_of is None and mode.recomputes:
        return mode
    attach = mode.attach

    def attach_both(model: nn.Module, streams: Streams, options: AttachOptions = NO_OPTIONS) -> Attached:
        attached = attach(model, streams, options)
        undo, detach = recompute(model.blocks if blocks_of is None else blocks_of(model)), attached.detach
        attached.detach = lambda: (undo(), detach())
        return attached

    mode.attach = attach_both
    return mode
