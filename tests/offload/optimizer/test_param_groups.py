"""Parameter groups: those that are refused, and those that do not decay."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.optimizer.adamw import HostAdamW
from offload.optimizer.param_groups import decay_groups, hyperparameters_of
from tests.offload.helpers.optimizers import SETTINGS, give_gradients, parameters, same
from training.optim import AdamW


def test_settings_are_those_of_the_group_at_the_time():
    optimizer = HostAdamW(parameters(), **SETTINGS, threads=1)
    (group,) = optimizer.param_groups
    group["lr"] = 0.5
    assert hyperparameters_of(group) == (0.5, 0.9, 0.95, 1e-8, 0.1)


@pytest.mark.parametrize(("key", "value"), [("maximize", True), ("amsgrad", True), ("decoupled_weight_decay", False)])
def test_settings_of_a_group_that_mean_other_arithmetic_are_refused(key: str, value: bool):
    weights = parameters()
    message = f"a parameter group has {key}={value}, which is not supported"
    with pytest.raises(ValueError, match=message):
        HostAdamW([{"params": weights, key: value}], threads=1)
    for all_decay in (False, True):
        optimizer = HostAdamW(weights[2:], threads=1, decay_norms_and_biases=all_decay)
        count = len(optimizer.param_groups)
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": weights[:2], key: value})
        assert len(optimizer.param_groups) == count
    give_gradients(weights, 0)
    before = [weight.detach().clone() for weight in weights]
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert same(weights, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_dtypes_without_an_update_are_refused_unless_they_are_frozen(dtype: torch.dtype):
    weights = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=dtype))]
    message = f"a parameter is {dtype}: .* takes float32, bfloat16 and float16"
    with pytest.raises(ValueError, match=message):
        HostAdamW(weights, threads=1)
    optimizer = HostAdamW([weights[0], weights[1].requires_grad_(False)], threads=1)
    weights[1].requires_grad_(True)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert all(weight.eq(1).all() for weight in weights)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0: must be at least 0"),
        ({"lr": float("nan")}, "lr=nan: must be at least 0"),
        ({"eps": 1e-60}, "eps=1e-60: must be at least 1e-45"),
        ({"betas": (1.0, 0.9)}, "betas=.*: must be two numbers, at least 0 and below 1"),
        ({"betas": (0.9,)}, "betas=.*: must be two numbers, at least 0 and below 1"),
    ],
)
def test_settings_of_a_group_out_of_range_are_refused(setting: dict, message: str):
    weights = parameters()
    optimizer = HostAdamW(weights[2:], threads=1)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": weights[:2], **setting})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=message):
        HostAdamW(weights, threads=1, **setting)


def test_groups_without_decay_are_those_of_norms_and_biases():
    model = nn.Sequential(nn.Embedding(4, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Conv2d(1, 1, 3))
    decaying, constant = decay_groups(model.parameters())
    assert same(decaying["params"], [model[0].weight, model[2].weight, model[3].weight])
    assert same(constant["params"], [model[1].weight, model[1].bias, model[2].bias, model[3].bias])
    assert constant["weight_decay"] == 0
    assert "weight_decay" not in decaying

    given = [{"params": model[1].weight, "lr": 1.0}, {"params": [model[2].weight], "weight_decay": 3.0}]
    one, other = decay_groups(given)
    assert (one["lr"], one["weight_decay"]) == (1.0, 0.0)
    assert other["weight_decay"] == 3.0
    named = decay_groups(model[1].named_parameters())
    assert [name for name, _ in named[0]["params"]] == ["weight", "bias"]


@pytest.mark.parametrize("optimizer", [AdamW, lambda *given, **settings: HostAdamW(*given, **settings, threads=1)])
@pytest.mark.parametrize("is_later", [False, True])
def test_norms_and_biases_do_not_decay_where_that_is_chosen(optimizer: Callable, is_later: bool):
    weights = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    first = [nn.Parameter(torch.ones(4, 4))] if is_later else weights
    made = optimizer(first, **SETTINGS, decay_norms_and_biases=False)
    if is_later:
        made.add_param_group({"params": weights, "weight_decay": 0.2})
        assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.2, 0.0]
    made.step()
    assert (weights[0] < 1).all()
    assert (weights[1] == 1).all()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy_takes_further_groups(duplicate: Callable):
    made = duplicate(HostAdamW([nn.Parameter(torch.ones(4, 4))], **SETTINGS, threads=1, decay_norms_and_biases=False))
    made.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert made.param_groups[-1]["weight_decay"] == 0


@pytest.mark.parametrize("decays", [True, False])
@pytest.mark.parametrize(
    ("given", "message"),
    [(["weight"], "can only optimize Tensors"), ([{"params": {nn.Parameter(torch.ones(2))}}], "set")],
)
def test_what_is_no_list_of_tensors_is_refused(given: list, message: str, decays: bool):
    with pytest.raises(TypeError, match=message):
        HostAdamW(given, **SETTINGS, threads=1, decay_norms_and_biases=decays)
