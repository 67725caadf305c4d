"""Parameters, gradients and comparisons for the tests of HostAdamW."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(7, 48), (48,), (16,), (64, 16), (32, 3, 4, 4)]
STEPS = 20


def parameters(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def give_gradients(of: Iterable[Tensor], step: int) -> None:
    for index, parameter in enumerate(of):
        generator = torch.Generator().manual_seed(1000 * step + index)
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter.device, parameter.dtype)


def train(
    optimizer: torch.optim.Optimizer,
    weights: list[nn.Parameter],
    steps: Iterable[int] = range(STEPS),
    before_step: Callable[[], None] = lambda: None,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> list[nn.Parameter]:
    for step in steps:
        give_gradients(weights, step)
        before_step()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return weights


def same(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def near(first: Iterable[Tensor], second: Iterable[Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        scale = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * scale)
