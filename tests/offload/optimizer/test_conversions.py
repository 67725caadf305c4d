"""States go from any format into any other: exactly where the other holds as much, near it where not."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from offload.optimizer.adamw import HostAdamW
from offload.optimizer.conversions import in_format
from offload.optimizer.formats import MASTER_DTYPES, MASTER_NAMES, StateFormat
from offload.optimizer.rounding import join
from tests.offload.helpers.kernels import FORMATS
from tests.offload.helpers.optimizers import OFF, SETTINGS, parameters, same, train

NEAREST = [format for format in FORMATS if format.state_rounding == "nearest"]
EXACT = ("fp32", "compact")


def trained(format: StateFormat) -> tuple[list[nn.Parameter], HostAdamW]:
    weights = parameters(torch.bfloat16)
    optimizer = HostAdamW(weights, **SETTINGS, **OFF, **vars(format))
    train(optimizer, weights, range(4))
    return weights, optimizer


@pytest.mark.parametrize(("one", "other"), list(itertools.product(NEAREST, NEAREST)), ids=str)
def test_a_state_goes_into_any_format(one: StateFormat, other: StateFormat):
    """Its tensors are those that the other format has, and float32 states come back as they were."""
    weights, optimizer = trained(one)
    _, wanted = trained(other)
    for weight, like in zip(weights, wanted.param_groups[0]["params"], strict=True):
        state = optimizer.state[weight]
        found = in_format(state, weight, other)
        made = {name: (tensor.shape, tensor.dtype) for name, tensor in wanted.state[like].items()}
        if one.master == "stochastic":
            made.pop(MASTER_NAMES.get(other.master_dtype(torch.bfloat16)), None)
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == made
        if other == StateFormat("fp32", "fp32"):
            back = in_format(found, weight, one)
            # Codes are made anew from numbers whose largest may have been rounded.
            names = [name for name in back if "_codes" not in name and "_scale" not in name]
            assert all(torch.equal(back[name], state[name]) for name in names)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("first", "second"), [EXACT, EXACT[::-1]], ids=str)
def test_a_run_goes_on_bitwise_with_the_other_exact_master(first: str, second: str, state_dtype: str):
    straight, stopped = parameters(torch.bfloat16), parameters(torch.bfloat16)
    make = {"state_dtype": state_dtype, **SETTINGS, **OFF}
    train(HostAdamW(straight, master=first, **make), straight, range(6))
    train(one := HostAdamW(stopped, master=first, **make), stopped, range(3))
    resumed = [nn.Parameter(weight.detach().clone()) for weight in stopped]
    other = HostAdamW(resumed, master=second, **make)
    other.load_state_dict(one.state_dict())
    train(other, resumed, range(3, 6))
    assert same(straight, resumed)


def test_a_master_whose_weight_was_rounded_to_even_loses_at_most_its_last_bit():
    """State of torch's rounding: a tie under an even weight has a remainder of 17 bits."""
    master = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1.25, 1.2345, -1e-40, float("inf"), float("nan")])
    weight = nn.Parameter(master.bfloat16())
    moment = torch.zeros(8)
    state = {"step": torch.tensor(1.0), "exp_avg": moment, "exp_avg_sq": moment, "master": master}
    remainder = in_format(state, weight, StateFormat())["remainder"]
    back = join(weight.detach(), remainder, torch.empty(8))
    lost = back.view(torch.int32) - master.view(torch.int32)
    assert lost[:-1].tolist() == [-1, 0, -1, 0, 0, 0, 0]
    assert back[-1].isnan()


@pytest.mark.parametrize("master", MASTER_DTYPES)
def test_a_float16_weight_gets_a_master_near_it_from_a_bfloat16_one(master: str):
    """Remainders are the low bits of bfloat16 numbers, and of no others."""
    weights, optimizer = trained(StateFormat(master))
    halves = [nn.Parameter(weight.detach().half()) for weight in weights]
    other = HostAdamW(halves, **OFF)
    other.load_state_dict(optimizer.state_dict())
    other.param_groups[0]["lr"] = 0.0
    train(other, halves, [4])
    for half, weight in zip(halves, weights, strict=True):
        torch.testing.assert_close(other.state[half]["master"], weight.detach().float(), rtol=2**-7, atol=1e-6)


def test_a_state_of_torchs_adamw_has_no_master_to_convert():
    weights = parameters(torch.bfloat16)
    train(torchs := torch.optim.AdamW(weights), weights, range(2))
    for format in NEAREST:
        ours = [nn.Parameter(weight.detach().clone()) for weight in weights]
        optimizer = HostAdamW(ours, **OFF, **vars(format))
        optimizer.load_state_dict(copy.deepcopy(torchs.state_dict()))
        train(optimizer, ours, range(2, 3))
        assert all(optimizer.state[weight]["step"] == 3 for weight in ours)
