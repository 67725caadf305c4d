"""The modes of conf/offload as the configuration makes them, for tests that run every mode."""

from functools import cache

from hydra import compose

from offload.modes.activation_mode import ActivationMode
from offload.modes.mode import Mode
from offload.modes.weight_mode import WeightMode
from tests.training.helpers.in_process import conf_initialised
from training.config.construct import make_mode
from training.config.modes import mode_options


@cache
def made(name: str) -> Mode:
    with conf_initialised():
        return make_mode(compose("config", [f"offload={name}"]).offload)


def small_modes() -> dict[str, tuple[str, ...]]:
    """Returns each mode with overrides by which it moves something of a small model."""
    return {name: ("offload.shards=2",) if name == "shard_offload" else () for name in mode_options()}


def moves_activations(name: str) -> bool:
    return isinstance(made(name), ActivationMode) or made(name).recomputes


def streams_weights(name: str) -> bool:
    return isinstance(getattr(made(name), "weights", made(name)), WeightMode)
