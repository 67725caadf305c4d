"""Objects of options: what a class refuses is refused under the whole path of its key."""

import pytest
import torch
from hydra import compose
from omegaconf import DictConfig

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.save_on_cpu import SaveOnCpu
from offload.modes.tensor_swap import TensorSwap
from tests.offload.helpers.models import Stack
from tests.training.helpers.in_process import conf_initialised
from training.config import schema
from training.config.construct import check_optimizer, keys_under, make_mode
from training.errors import UserError
from training.sweeps import launcher

schema.register()
launcher.register_launcher()


def composed(*overrides: str) -> DictConfig:
    with conf_initialised():
        return compose("config", list(overrides))


def test_a_mode_gets_the_values_of_its_keys():
    mode = make_mode(composed("offload=layer_stream", "offload.slots=5", "offload.include=[blocks.*]").offload)
    assert type(mode) is LayerStream
    assert (mode.slots, mode.include, mode.prefetch) == (5, ["blocks.*"], None)


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
    built = make_mode(composed(*overrides).offload)
    assert type(built) is mode
    assert type(built.weights) is weights


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("offload=layer_stream", "offload.slots=0"), "offload.slots=0: must be at least 1"),
        (("offload=layer_stream_swap", "offload.weights.slots=0"), "offload.weights.slots=0: must be at least 1"),
        (
            ("offload=layer_stream_swap", "offload.weights.prefetch=3"),
            "offload.weights.prefetch=3: must be below slots=3",
        ),
        (("offload=layer_stream_swap", "offload.weights.resident=some"), "offload.weights.resident=some: must be"),
        (("offload=layer_stream_swap", "offload.budget=x"), "offload.budget=x: must be bytes"),
        (
            ("offload=layer_stream_swap", "offload@offload.weights=shard_offload", "offload.weights.shards=0"),
            "offload.weights.shards=0: must be at least 1",
        ),
    ],
)
def test_a_knob_that_fits_no_model_is_refused_by_its_key(overrides: tuple[str, ...], message: str):
    with pytest.raises(UserError) as caught:
        make_mode(composed(*overrides).offload)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("call", ["footprint", "attach"])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("offload=layer_stream", "offload.resident=99"), "offload.resident=99: the model has 4 units"),
        (("offload=layer_stream_swap", "offload.weights.resident=99"), "offload.weights.resident=99: the model has 4"),
        (("offload=layer_stream", "offload.layers=a.b"), "offload.layers=a.b: no list of blocks there"),
        (("offload=layer_stream_swap", "offload.weights.layers=a.b"), "offload.weights.layers=a.b: no list of blocks"),
        (("offload=shard_offload", "offload.shards=9"), "offload.shards=9: must be between 1 and"),
    ],
)
@pytest.mark.slow
def test_a_knob_that_does_not_fit_the_model_is_refused_by_its_key(overrides, message: str, call: str):
    mode = make_mode(composed(*overrides).offload)
    with pytest.raises(UserError) as caught, keys_under("offload"):
        getattr(mode, call)(Stack(), *([None] if call == "attach" else []))
    assert str(caught.value).startswith(message)


def test_an_optimizer_is_checked_without_parameters_in_memory(monkeypatch: pytest.MonkeyPatch):
    def compiled(*arguments: object) -> None:
        pytest.fail("a kernel was compiled")

    monkeypatch.setattr("offload.optimizer.adamw.update_on", compiled)
    check_optimizer(composed("optimizer=host_adamw").optimizer)
    with pytest.raises(UserError, match=r"^optimizer\.betas=\[0\.9, 1\.0\]: must be two numbers"):
        check_optimizer(composed("optimizer.betas=[0.9,1]").optimizer)


def test_other_errors_pass():
    with pytest.raises(torch.OutOfMemoryError), keys_under("offload"):
        raise torch.OutOfMemoryError("no room")
