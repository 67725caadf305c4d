"""The modes of conf/offload as the configuration makes them, for tests that run every mode."""

from __future__ import annotations

from functools import cache

from hydra import compose, initialize_config_dir

from offload.modes.activation_mode import ActivationMode
from offload.modes.mode import Mode
from offload.modes.weight_mode import WeightMode
from tests.training.helpers.in_process import CONF
from training.config.construct import make_mode
from training.config.modes import mode_options

# Values of knobs with which a mode moves something of a model of a few kilobytes.
SMALL_KNOBS = {"shards": "2"}


@cache
def made(name: str) -> Mode:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return make_mode(compose("config", [f"offload={name}"]).offload)


def small_modes() -> dict[str, tuple[str, ...]]:
    """Returns each mode with overrides by which it moves something of a small model."""
    return {
        name: tuple(f"offload.{knob}={value}" for knob, value in SMALL_KNOBS.items() if hasattr(made(name), knob))
        for name in mode_options()
    }


def moves_activations(name: str) -> bool:
    return isinstance(made(name), ActivationMode) or made(name).recomputes


def streams_weights(name: str) -> bool:
    return isinstance(getattr(made(name), "weights", made(name)), WeightMode)
