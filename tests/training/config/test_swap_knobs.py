"""Activation swapping over a mode for the weights: the keys of both, in the configuration and on the command line."""

import pytest
from hydra import compose
from omegaconf import DictConfig

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.save_on_cpu import SaveOnCpu
from offload.modes.tensor_swap import TensorSwap
from tests import ROOT
from tests.training.helpers.in_process import conf_initialised
from training.config import schema
from training.config.construct import make_mode
from training.config.validation import check
from training.errors import UserError
from training.sweeps import launcher

CONF = ROOT / "conf"

schema.register()
launcher.register_launcher()


def composed(*overrides: str) -> DictConfig:
    with conf_initialised():
        return compose("config", list(overrides))


@pytest.mark.parametrize(
    ("overrides", "mode", "weights"),
    [
        (["offload=tensor_swap"], TensorSwap, Resident),
        (["offload=tensor_swap", "offload@offload.weights=bounce_linear"], TensorSwap, BounceLinear),
        (["offload=layer_stream_swap"], TensorSwap, LayerStream),
        (["offload=bounce_linear_swap"], TensorSwap, BounceLinear),
        (["offload=bounce_linear_swap", "offload@offload.weights=none"], TensorSwap, Resident),
        (["offload=save_on_cpu"], SaveOnCpu, Resident),
        (["offload=save_on_cpu", "offload@offload.weights=layer_stream"], SaveOnCpu, LayerStream),
    ],
)
def test_any_mode_for_the_weights(overrides: list[str], mode: type, weights: type):
    config = composed(*overrides)
    check(config)
    built = make_mode(config.offload)
    assert type(built) is mode
    assert type(built.weights) is weights


def test_the_keys_of_both():
    config = composed("offload=layer_stream_swap", "offload.weights.slots=5", "offload.budget=8GiB")
    check(config)
    assert (config.offload.weights.slots, config.offload.budget) == (5, "8GiB")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["offload.weights.prefetch=3"], "offload.weights.prefetch=3: must be below slots=3"),
        (["offload.weights.resident=some"], "offload.weights.resident=some: must be"),
        (["offload.weights.slots=0"], "offload.weights.slots=0: must be at least 1"),
        (["+offload.weights.slotz=4"], "offload.weights.slotz: unknown key. Did you mean offload.weights.slots"),
        (["offload.budget=automatic"], "offload.budget=automatic: must be bytes, .*, or auto"),
        (
            ["offload@offload.weights=shard_offload", "offload.weights.shard_bytes=2GB"],
            "offload.weights.shard_bytes=2GB: must be bytes",
        ),
    ],
)
@pytest.mark.slow
def test_a_value_that_does_not_fit_is_refused_by_its_whole_key(overrides: list[str], line: str):
    with pytest.raises(UserError, match=line):
        check(composed("offload=layer_stream_swap", *overrides))
