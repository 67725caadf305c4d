"""Small parameters of a device are updated by one call, and get the numbers that they get one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.optimizer import kernels, together
from offload.optimizer.adamw import HostAdamW
from tests.offload.helpers.kernels import needs_gpu
from tests.offload.helpers.optimizers import OFF, SETTINGS, parameters, same, train


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Treats the CPU as a device that is sent calls; the number of parameters of each call."""
    sizes = []

    def noted(weights: list[torch.Tensor], *others: object, **settings: object) -> None:
        sizes.append(len(weights))
        kernels.fused_adamw_(weights, *others, **settings)

    monkeypatch.setattr(together, "LAUNCHING", ("cpu",))
    monkeypatch.setattr(together, "fused_adamw_", noted)
    return sizes


def made(dtype: torch.dtype = torch.float32, **options) -> tuple[list[nn.Parameter], HostAdamW]:
    """Two groups; the last parameters have another learning rate."""
    weights = parameters(dtype)
    groups = [{"params": weights[:3]}, {"params": weights[3:], "lr": 3e-3}]
    return weights, HostAdamW(groups, **SETTINGS, **OFF, **options)


def scaled(optimizer: HostAdamW, scale: float) -> HostAdamW:
    step = optimizer.step
    optimizer.step = lambda: step(scale=scale)
    return optimizer


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize(("tile", "per_step"), [(1 << 24, [3, 2]), (1600, [3, 1, 1]), (1100, [3, 1])])
def test_gives_the_numbers_of_one_by_one(
    calls: list[int], monkeypatch: pytest.MonkeyPatch, tile: int, per_step: list[int], scale: float
):
    """A call has at most a tile of elements; the last parameter, of 1536, may be larger than that."""
    monkeypatch.setattr(kernels, "DEVICE_TILE", tile)
    weights, optimizer = made()
    train(scaled(optimizer, scale), weights)
    assert calls == 20 * per_step
    versions = [weight._version for weight in weights]
    monkeypatch.setattr(together, "LAUNCHING", ())
    others, other = made()
    train(scaled(other, scale), others)
    assert len(calls) == 20 * len(per_step)
    assert same(weights, others)
    assert all(at > 0 for at in versions)
    for weight, same_weight in zip(weights, others, strict=True):
        found, expected = optimizer.state[weight], other.state[same_weight]
        assert found.keys() == expected.keys()
        assert same(found.values(), expected.values())


def test_a_parameter_that_began_later_counts_its_own_steps(calls: list[int], monkeypatch: pytest.MonkeyPatch):
    def run() -> list[nn.Parameter]:
        weights, optimizer = made()
        train(optimizer, weights[1:], range(4))
        return train(optimizer, weights, range(4, 8))

    seen = run()
    assert calls == [2, 2] * 4 + [3, 2] * 4
    monkeypatch.setattr(together, "LAUNCHING", ())
    assert same(seen, run())


def empty(weights: list[nn.Parameter]) -> None:
    weights[1].data = torch.empty(0)


def strided(weights: list[nn.Parameter]) -> None:
    weights[3].data = weights[3].data.t().contiguous().t()


@pytest.mark.parametrize(
    ("change", "dtype", "options", "expected"),
    [
        (empty, torch.float32, {}, [2, 2]),
        (strided, torch.float32, {}, [3, 1]),
        (lambda weights: None, torch.bfloat16, {}, []),
        (lambda weights: None, torch.float32, {"state_dtype": "bf16"}, []),
    ],
    ids=["empty", "strided", "bf16", "moments in bf16"],
)
def test_others_are_updated_one_by_one(
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[list[nn.Parameter]], None],
    dtype: torch.dtype,
    options: dict[str, str],
    expected: list[int],
):
    def run() -> list[nn.Parameter]:
        weights, optimizer = made(dtype, **options)
        change(weights)
        return train(optimizer, weights, range(3))

    seen = run()
    assert calls == 3 * expected
    monkeypatch.setattr(together, "LAUNCHING", ())
    assert same(seen, run())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_on_a_gpu_it_gives_the_numbers_of_one_by_one(monkeypatch: pytest.MonkeyPatch, scale: float):
    def run() -> list[nn.Parameter]:
        weights = parameters(device="cuda")
        return train(scaled(HostAdamW(weights, **SETTINGS, **OFF), scale), weights)

    seen = run()
    monkeypatch.setattr(together, "LAUNCHING", ())
    assert same(seen, run())
