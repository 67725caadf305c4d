from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from offload.optimizer.formats import round_weights
from training.optim import AdamW

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 5
SHAPES = [(7, 45), (1,), (), (64, 16), (0,), (3, 5, 2)]


def parameters(dtype: torch.dtype, device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def gradient(of: Tensor, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + of.numel())
    return torch.randn(of.shape, generator=generator).to(of.device, of.dtype)


def train(optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = gradient(parameter, step)
        optimizer.step()
        optimizer.zero_grad()


def reference(shadows: list[nn.Parameter], dtype: torch.dtype) -> list[Tensor]:
    """torch's fused AdamW by hand on float32 masters of `shadows`, the last value rounded to `dtype`."""
    masters = [nn.Parameter(shadow.detach().float()) for shadow in shadows]
    fused = torch.optim.AdamW(masters, **SETTINGS, fused=True)
    for step in range(STEPS):
        for master, shadow in zip(masters, shadows, strict=True):
            master.grad = gradient(shadow, step).float()
        fused.step()
    rounded = [torch.empty(master.numel(), dtype=dtype, device=master.device) for master in masters]
    for master, into in zip(masters, rounded, strict=True):
        round_weights(master.detach().view(-1), into)
    return [into.view_as(master) for master, into in zip(masters, rounded, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_fused_adamw_on_float32_masters_bitwise(dtype: torch.dtype) -> None:
    expected = reference(parameters(dtype), dtype)
    trained = parameters(dtype)
    train(AdamW(trained, **SETTINGS))
    assert all(torch.equal(value, target) for value, target in zip(trained, expected, strict=True))


def test_updates_too_small_for_bf16_add_up() -> None:
    ours, alone = (nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(2))
    settings = SETTINGS | {"lr": 1e-4, "weight_decay": 0.0}
    for weights, adamw in ((ours, AdamW([ours], **settings)), (alone, torch.optim.AdamW([alone], **settings))):
        for _ in range(100):
            weights.grad = torch.ones_like(weights)
            adamw.step()
    assert torch.equal(alone, torch.ones_like(alone))
    torch.testing.assert_close(ours, torch.full_like(ours, 0.99))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "view",
    [
        lambda flat: flat[16:256].view(4, 60),
        lambda flat: flat.view(2, 4, 4, 8).to(memory_format=torch.channels_last),
        lambda flat: flat.view(16, 16).t(),
        lambda flat: flat.view(16, 16)[:, 3:11],
    ],
    ids=["slice of a flat buffer", "channels last", "transposed", "columns"],
)
def test_any_layout_of_parameter_and_gradient(view: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    flat = torch.randn(256).to(dtype)
    before = flat.clone()
    parameter = nn.Parameter(view(flat))
    plain = nn.Parameter(parameter.detach().clone(memory_format=torch.contiguous_format))
    train(AdamW([parameter], **SETTINGS))
    train(AdamW([plain], **SETTINGS))
    assert torch.equal(parameter, plain)
    assert not torch.equal(parameter, view(before))
    # The parameter is still the same memory, and nothing beside it was written.
    if parameter.data_ptr() - flat.data_ptr() in range(flat.numel() * flat.element_size()):
        assert torch.equal(view(flat), parameter)
        assert (flat != before).sum() <= parameter.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_version_of_an_updated_parameter_rises_and_of_no_other(dtype: torch.dtype) -> None:
    updated, frozen = (nn.Parameter(torch.ones(4, dtype=dtype)) for _ in range(2))
    updated.grad = torch.ones_like(updated)
    versions = updated._version, frozen._version
    adamw = AdamW([updated, frozen], **SETTINGS)
    adamw.step()
    assert updated._version > versions[0]
    assert frozen._version == versions[1]
    assert frozen not in adamw.state
