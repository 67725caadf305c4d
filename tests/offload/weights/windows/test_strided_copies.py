from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from offload.weights.windows.strided_copies import copied_with_strides

WAYS = {
    "plain": lambda table: table,
    "turned": lambda table: table.t(),
    "expanded": lambda table: table.expand(3, -1, -1),
    "part": lambda table: table[1:, 1:3],
    "steps": lambda table: table[::2],
    "nothing": lambda table: table[:0, 1:3],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_copy_has_values_strides_and_memory_of_its_own(way: Callable):
    table = torch.randn(5, 4)
    view = way(table)
    copy = copied_with_strides(view)
    assert torch.equal(copy, view)
    assert copy.stride() == view.stride() or not view.numel()
    before = copy.clone()
    table.zero_()
    assert torch.equal(copy, before)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_its_gradients_are_those_of_the_tensor(way: Callable):
    table, other = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)).unbind()
    gradients = []
    for copied in (False, True):
        leaf = table.clone().requires_grad_()
        view = way(leaf)
        weights = way(other.clone()).contiguous().cos()
        ((copied_with_strides(view) if copied else view) * weights).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", [torch.conj, lambda table: table.conj().imag], ids=["conjugate", "negative"])
def test_a_copy_of_a_lazy_view_is_one(way: Callable, kind: Callable):
    """Kernels resolve such views before they compute, which may change strides, and so how they round."""
    leaf = torch.randn(5, 4, dtype=torch.complex64).requires_grad_()
    view = kind(way(leaf))
    copy = copied_with_strides(view)
    assert (copy.is_conj(), copy.is_neg()) == (view.is_conj(), view.is_neg())
    assert torch.equal(copy, view)
    assert copy.stride() == view.stride() or not view.numel()
    (expected,) = torch.autograd.grad((view * view).sum().abs(), leaf)
    (found,) = torch.autograd.grad((copy * copy).sum().abs(), leaf)
    assert torch.equal(found, expected)
