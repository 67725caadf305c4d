"""The norm of a gradient is right for any number of elements, as torch's own on the CPU is not."""

import pytest
import torch

from offload.norms import PIECE, l2_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [0, 1, PIECE, PIECE + 1, 3 * PIECE, 1 << 24])
def test_it_is_right_for_any_number_of_elements(count: int, dtype: torch.dtype):
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)).mul_(1e-4).to(dtype)
    norm = l2_norm(values)
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    assert norm.item() == pytest.approx(values.double().norm().item(), rel=1e-5)


def test_torch_s_own_would_not_do():
    """The day it does, this file can go."""
    values = torch.full((1 << 24,), 1e-4)
    exact = values.double().norm().item()
    assert torch.linalg.vector_norm(values).item() != pytest.approx(exact, rel=1e-4)
    assert l2_norm(values).item() == pytest.approx(exact, rel=1e-5)


def test_shape_and_order_in_memory_change_no_bit():
    values = torch.randn(64, 48, 5, 7)
    other = values.to(memory_format=torch.channels_last)
    assert values.numel() > PIECE
    assert torch.equal(l2_norm(values), l2_norm(other))
    assert torch.equal(l2_norm(values), l2_norm(values.flatten()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, -1])
def test_what_is_not_finite_shows(value: float, at: int):
    values = torch.zeros(2 * PIECE + 3)
    values[at] = value
    assert not l2_norm(values).isfinite()


def test_it_has_no_graph():
    assert not l2_norm(torch.ones(2 * PIECE, requires_grad=True)).requires_grad
