import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from offload.optimizer.rounding import round_weights
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


def test_moments_are_float32_and_masters_only_where_needed() -> None:
    single, half = (nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    adamw = AdamW([single, half], **SETTINGS)
    train(adamw)
    assert set(adamw.state[single]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(adamw.state[half]) == {"step", "exp_avg", "exp_avg_sq", "remainder"}
    assert adamw.state[half].pop("remainder").dtype == torch.int16
    for state in adamw.state.values():
        assert all(value.dtype == torch.float32 for value in state.values())
        assert state["step"] == STEPS


def test_groups_and_schedules_have_their_own_settings() -> None:
    first, second = (nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    adamw = AdamW([{"params": [first]}, {"params": [second], "lr": 0.0}], **SETTINGS)
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1.0 if step == 0 else 0.0)
    train(adamw, range(1))
    schedule.step()
    after_one = first.detach().clone()
    assert (after_one < 1).any()
    train(adamw, range(1, 3))
    assert torch.equal(first, after_one)
    assert torch.equal(second, torch.ones_like(second))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_resumed_from_its_state_dict_goes_on_bitwise(dtype: torch.dtype, tmp_path) -> None:
    straight = parameters(dtype)
    train(AdamW(straight, **SETTINGS), range(6))

    stopped = parameters(dtype)
    first_half = AdamW(stopped, **SETTINGS)
    train(first_half, range(3))
    torch.save({"weights": stopped, "optimizer": first_half.state_dict()}, tmp_path / "checkpoint.pt")

    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed = [nn.Parameter(weight.detach()) for weight in loaded["weights"]]
    second_half = AdamW(resumed, **SETTINGS | {"lr": 123.0})
    second_half.load_state_dict(loaded["optimizer"])
    train(second_half, range(3, 6))
    assert all(torch.equal(value, target) for value, target in zip(resumed, straight, strict=True))


def test_state_of_torchs_adamw_loads() -> None:
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 9)) for _ in range(2))
    torchs = torch.optim.AdamW([theirs], **SETTINGS)
    train(torchs, range(3))
    adamw = AdamW([ours], **SETTINGS)
    adamw.load_state_dict(copy.deepcopy(torchs.state_dict()))
    with torch.no_grad():
        ours.copy_(theirs)
    train(adamw, range(3, 5))
    train(torchs, range(3, 5))
    torch.testing.assert_close(ours, theirs)
