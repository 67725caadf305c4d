"""The states of HostAdamW: layout, bytes, and their way into torch's AdamW and back."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from optimizer_support import COMPILES, OFF, SETTINGS, near, parameters, same, train
from torch import nn

from offload import adamw_update, host_optimizer
from offload.host_optimizer import HostAdamW


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that a parameter has several of, and a measurement that takes no time."""
    monkeypatch.setattr(adamw_update, "HOST_TILE", 256)
    monkeypatch.setattr(adamw_update, "SAMPLE", 1 << 12)


def roundtrip(state_dict: dict) -> dict:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("compile", COMPILES)
def test_a_run_resumed_from_its_state_dict_goes_on_bitwise(dtype: torch.dtype, state_dtype: str, compile: str):
    options = SETTINGS | {"state_dtype": state_dtype, "compile": compile, "threads": 1}
    straight, stopped = parameters(dtype), parameters(dtype)
    train(HostAdamW(straight, **options), straight, range(6))
    train(first := HostAdamW(stopped, **options), stopped, range(3))
    saved = roundtrip(first.state_dict())
    resumed = [nn.Parameter(weight.detach().clone()) for weight in stopped]
    second = HostAdamW(resumed, **options | {"lr": 9.0})
    second.load_state_dict(saved)
    train(second, resumed, range(3, 6))
    assert same(straight, resumed)


def test_state_of_torchs_adamw_loads_and_loads_back():
    ours, theirs = parameters(), parameters()
    train(torchs := torch.optim.AdamW(theirs, **SETTINGS), theirs, range(3))
    host = HostAdamW(ours, **OFF)
    host.load_state_dict(roundtrip(torchs.state_dict()))
    with torch.no_grad():
        for mine, other in zip(ours, theirs, strict=True):
            mine.copy_(other)
    train(host, ours, range(3, 6))
    train(torchs, theirs, range(3, 6))
    near(ours, theirs)

    back = [nn.Parameter(weight.detach().clone()) for weight in ours]
    returned = torch.optim.AdamW(back)
    returned.load_state_dict(roundtrip(host.state_dict()))
    assert returned.param_groups[0]["lr"] == SETTINGS["lr"]
    train(returned, back, range(6, 9))
    train(host, ours, range(6, 9))
    near(back, ours)


def test_state_of_bf16_weights_goes_both_ways_with_torchs_adamw():
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    train(host := HostAdamW(ours, **SETTINGS, **OFF), ours, range(2))
    torchs = torch.optim.AdamW(theirs)
    torchs.load_state_dict(roundtrip(host.state_dict()))
    train(torchs, theirs, range(2, 3))

    weights = parameters(torch.bfloat16)
    fresh = HostAdamW(weights, **OFF)
    fresh.load_state_dict(roundtrip(torchs.state_dict()))
    train(fresh, weights, range(3, 4))
    state = fresh.state[weights[0]]
    assert state["exp_avg"].dtype == torch.float32
    assert state["step"] == 4
    assert torch.equal(state["master"].bfloat16(), weights[0])


def test_states_have_the_layout_of_torchs_adamw():
    weights = parameters(torch.bfloat16)
    train(host := HostAdamW(weights, **SETTINGS, **OFF), weights, range(1))
    reference = parameters()
    train(torchs := torch.optim.AdamW(reference, **SETTINGS), reference, range(1))
    ours, theirs = host.state_dict(), torchs.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for index, expected in theirs["state"].items():
        state = ours["state"][index]
        assert set(state) == {*expected, "master"}
        assert all(
            state[name].shape == value.shape and state[name].dtype == value.dtype for name, value in expected.items()
        )


def test_unsupported_or_foreign_state_is_refused():
    weights = parameters()
    host = HostAdamW(weights, **OFF)
    with pytest.raises(ValueError, match="amsgrad=True, which is not supported"):
        host.load_state_dict(torch.optim.AdamW(weights, amsgrad=True).state_dict())
    with pytest.raises(ValueError, match="doesn't match the size"):
        host.load_state_dict(HostAdamW(weights[:2], **OFF).state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_bytes_are_known_before_they_are_allocated(dtype: torch.dtype, state_dtype: str):
    weights = [*parameters(dtype), nn.Parameter(torch.ones(4, 6, dtype=dtype).t())]
    weights[0].requires_grad_(False)
    meta = [nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad) for weight in weights]
    planned = HostAdamW.planned_bytes(meta, state_dtype)
    host = HostAdamW(weights, **SETTINGS, **OFF, state_dtype=state_dtype)
    assert host.state_bytes == 0
    host.allocate()
    assert host.state_bytes == planned
    allocated = {id(tensor) for state in host.state.values() for tensor in state.values()}
    trained = weights[1:]
    train(host, trained, range(2))
    assert {id(tensor) for state in host.state.values() for tensor in state.values()} == allocated


def test_allocated_or_made_at_the_first_update_is_the_same():
    early, late = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = HostAdamW(early, **SETTINGS, **OFF)
    optimizer.allocate()
    train(optimizer, early, range(3))
    train(HostAdamW(late, **SETTINGS, **OFF), late, range(3))
    assert same(early, late)


def test_a_host_without_room_is_said_before_anything_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_optimizer, "free_host_bytes", lambda: 1000)
    optimizer = HostAdamW(parameters(), **OFF)
    with pytest.raises(MemoryError, match="GiB of host memory are needed for the optimizer's states"):
        optimizer.allocate()
    assert optimizer.state_bytes == 0


def test_bf16_moments_stay_near_float32_ones():
    exact, rounded = parameters(), parameters()
    train(HostAdamW(exact, **SETTINGS, **OFF), exact)
    train(HostAdamW(rounded, **SETTINGS, **OFF, state_dtype="bf16"), rounded)
    assert not same(exact, rounded)
    for one, other in zip(exact, rounded, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-2)


def test_a_copy_of_the_optimizer_goes_on_alone():
    model = nn.Linear(16, 16)
    optimizer = HostAdamW(model.parameters(), **SETTINGS, **OFF)
    train(optimizer, list(model.parameters()), range(2))
    other, other_optimizer = copy.deepcopy((model, optimizer))
    train(optimizer, list(model.parameters()), range(2, 4))
    assert not torch.equal(model.weight, other.weight)
    train(other_optimizer, list(other.parameters()), range(2, 4))
    assert torch.equal(model.weight, other.weight)
