"""A stand-in passes on to its parameter what code does with it besides computing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.torch_private.running_microbatch import SideBySideError, running
from offload.weights.windows.stand_in_class import data_was_taken, forget_data_taken, like_host


class Special(nn.Parameter):
    pass


@pytest.fixture
def host() -> nn.Parameter:
    parameter = Special(torch.ones(2))
    parameter.mark = "of before"
    return parameter


@pytest.fixture
def reads() -> list[str]:
    return []


@pytest.fixture
def stand_in(host: nn.Parameter, reads: list[str]) -> torch.Tensor:
    return like_host(host * 1, host, lambda: reads.append("read"))


def test_class_and_attributes(host: nn.Parameter, stand_in: torch.Tensor):
    assert isinstance(stand_in, Special)
    assert type(stand_in).__name__ == "Special"
    assert stand_in.mark == "of before"
    stand_in.calls = 3
    assert host.calls == 3
    host.late = "set outside"
    forget_data_taken(stand_in)
    assert stand_in.late == "set outside"


def test_data_that_was_taken_is_noted(stand_in: torch.Tensor):
    assert not data_was_taken(stand_in)
    stand_in.data.zero_()
    assert data_was_taken(stand_in)
    forget_data_taken(stand_in)
    assert not data_was_taken(stand_in)


def test_the_gradient_is_that_of_the_parameter(host: nn.Parameter, stand_in: torch.Tensor, reads: list[str]):
    assert stand_in.grad is None
    stand_in.grad = torch.full((2,), 3.0)
    assert torch.equal(host.grad, torch.full((2,), 3.0))
    assert torch.equal(stand_in.grad, host.grad)
    stand_in.grad = None
    assert host.grad is None
    assert len(reads) == 4


def test_hooks_are_those_of_the_parameter(host: nn.Parameter, stand_in: torch.Tensor):
    seen = []
    handle = stand_in.register_hook(lambda gradient: gradient * 2)
    stand_in.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter))
    (host * 1).sum().backward()
    assert torch.equal(host.grad, torch.full((2,), 2.0))
    assert seen == [host]
    handle.remove()


def test_freezing_takes_both_out_of_graphs(host: nn.Parameter, stand_in: torch.Tensor):
    before = stand_in * 2
    assert stand_in.requires_grad_(True) is stand_in
    stand_in.requires_grad = False
    assert not host.requires_grad
    assert not stand_in.requires_grad
    assert not (stand_in * 2).requires_grad
    assert before.requires_grad
    with pytest.raises(RuntimeError, match="begins to train inside a forward"):
        stand_in.requires_grad_()


def test_beside_other_microbatches_it_is_refused(stand_in: torch.Tensor):
    with running(1):
        for use in (
            lambda: stand_in.grad,
            lambda: stand_in.requires_grad_(False),
            lambda: stand_in.register_hook(print),
            lambda: stand_in.register_post_accumulate_grad_hook(print),
        ):
            with pytest.raises(SideBySideError):
                use()
    with running(0):
        assert stand_in.grad is None, "the first sees what there is, as one after another"
