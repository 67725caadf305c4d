"""The states of parameters: bytes, devices, and masters that follow their weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.optimizer import adamw, kernels
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.states import StatePlacement, placed_bytes, state_bytes
from tests.offload.helpers.optimizers import COMPILES, OFF, SETTINGS, parameters, same, train


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tiles so small that a parameter has several, and the measurement of kernels short."""
    monkeypatch.setattr(kernels, "HOST_TILE", 256)
    monkeypatch.setattr(kernels, "SAMPLE", 1 << 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_bytes_are_known_before_they_are_allocated(dtype: torch.dtype, state_dtype: str):
    weights = [*parameters(dtype), nn.Parameter(torch.ones(4, 6, dtype=dtype).t())]
    weights[0].requires_grad_(False)
    meta = [nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad) for weight in weights]
    planned = HostAdamW.planned_bytes(meta, state_dtype)
    host = HostAdamW(weights, **SETTINGS, **OFF, state_dtype=state_dtype)
    assert not host.state
    host.allocate()
    assert sum(tensor.nbytes for state in host.state.values() for tensor in state.values()) == planned
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


def test_a_host_without_room_is_refused_before_any_state_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adamw, "free_host_bytes", lambda: 1000)
    optimizer = HostAdamW(parameters(), **OFF)
    with pytest.raises(MemoryError, match="GiB of host memory are needed for the optimizer's states"):
        optimizer.allocate()
    assert not optimizer.state


def test_bf16_moments_stay_near_float32_ones():
    exact, rounded = parameters(), parameters()
    train(HostAdamW(exact, **SETTINGS, **OFF), exact)
    train(HostAdamW(rounded, **SETTINGS, **OFF, state_dtype="bf16"), rounded)
    assert not same(exact, rounded)
    for one, other in zip(exact, rounded, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compile", COMPILES)
def test_any_layout_meets_its_own_elements(dtype: torch.dtype, compile: str):
    base = torch.randn(16, 16).to(dtype)
    crossed = nn.Parameter(base.clone().t())
    straight = nn.Parameter(base.t().contiguous())
    for weight in (crossed, straight):
        train(HostAdamW([weight], **SETTINGS, compile=compile, threads=1), [weight], range(3))
    assert torch.equal(crossed, straight)


def test_a_float32_weight_that_is_written_between_steps_is_the_truth():
    """Also in a layout that needs a master."""
    base = torch.randn(16, 16)
    crossed, straight = nn.Parameter(base.clone().t()), nn.Parameter(base.t().contiguous())
    for weight in (crossed, straight):
        train(optimizer := HostAdamW([weight], **SETTINGS, **OFF), [weight], range(2))
        with torch.no_grad():
            weight.mul_(0.5)
        train(optimizer, [weight], range(2, 4))
    assert torch.equal(crossed, straight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
def test_placed_states_have_a_master_and_the_bytes_that_were_counted(dtype: torch.dtype, moment: torch.dtype):
    placement, made = StatePlacement(moment), []
    weights = parameters(dtype)
    for weight in weights:
        state = {}
        placement.place(weight, state, torch.device("cpu"))
        placement.prepare(weight, state)
        assert torch.equal(state["master"], weight.float())
        made += state.values()
    assert sum(tensor.nbytes for tensor in made) == placed_bytes(weights, moment)
    masters = 4 * sum(weight.numel() for weight in weights) if dtype == torch.float32 else 0
    assert placed_bytes(weights, moment) == state_bytes(weights, moment) + masters


def test_a_placed_state_moves_and_later_ones_are_made_there():
    placement = StatePlacement(torch.float32)
    first, second = parameters()[:2]
    state = {}
    placement.prepare(first, state)
    meta = torch.device("meta")
    placement.place(first, state, meta)
    assert {tensor.device for tensor in state.values()} == {meta}
    placement.place(second, {}, meta)
    assert placement.device_of(second) == meta
    assert placement.is_placed(second)
    assert {tensor.device for tensor in placement.adopt(second, {"exp_avg": second.detach()}).values()} == {meta}


def test_a_loaded_state_gets_the_dtypes_of_the_state():
    placement = StatePlacement(torch.bfloat16)
    (weight, *_) = parameters(torch.bfloat16)
    loaded = {"step": torch.tensor(3, dtype=torch.int64), "exp_avg": weight.detach().t(), "master": weight.detach()}
    adopted = placement.adopt(weight, loaded)
    assert {name: tensor.dtype for name, tensor in adopted.items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "master": torch.float32,
    }
    assert adopted["exp_avg"].is_contiguous()
