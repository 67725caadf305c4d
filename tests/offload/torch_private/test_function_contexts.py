"""Contexts of autograd functions are noted while somebody watches, by thread, and torch is left as it was."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.autograd.function import BackwardCFunction

from offload.torch_private import function_contexts as function_contexts_module
from offload.torch_private.function_contexts import function_contexts, watch_contexts


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: torch.Tensor) -> torch.Tensor:
        return 2 * value

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class Owner:
    """Somebody who watches."""


@pytest.fixture(autouse=True)
def nobody_watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modes of other tests that the garbage collector has not found yet may still watch."""
    monkeypatch.setattr(function_contexts_module, "_watches", set())
    left = vars(BackwardCFunction).get("__init__")
    if left is not None:
        del BackwardCFunction.__init__
    yield
    if left is not None:
        BackwardCFunction.__init__ = left


@pytest.fixture
def watched() -> Iterator[None]:
    owner = Owner()
    end = watch_contexts(owner)
    yield
    end()
    assert "__init__" not in vars(BackwardCFunction)


def apply() -> torch.Tensor:
    return Double.apply(torch.ones(1, requires_grad=True))


@pytest.mark.usefixtures("watched")
def test_contexts_are_the_nodes_of_the_graph_in_their_order():
    assert function_contexts.begin() == 0
    first = apply()
    assert function_contexts.begin() == 1
    second = apply()
    assert [made() for made in function_contexts.made] == [first.grad_fn, second.grad_fn]
    function_contexts.end()
    assert len(function_contexts.made) == 2
    function_contexts.end()
    assert function_contexts.made == []
    apply()
    assert function_contexts.made == [], "nobody began"


@pytest.mark.usefixtures("watched")
def test_each_thread_has_its_own():
    function_contexts.begin()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(apply).result(300)
    assert function_contexts.made == []
    function_contexts.end()


def test_several_watch_until_the_last_ends():
    first, second = Owner(), Owner()
    end_first, end_second = watch_contexts(first), watch_contexts(second)
    end_first()
    end_first()
    assert "__init__" in vars(BackwardCFunction)
    end_second()
    assert "__init__" not in vars(BackwardCFunction)


def test_a_watch_ends_with_its_owner():
    first, second = Owner(), Owner()
    watch_contexts(first)
    watch_contexts(second)
    del first
    assert "__init__" in vars(BackwardCFunction)
    del second
    assert "__init__" not in vars(BackwardCFunction)
