"""A stand-in has the class and attributes of its parameter, and refuses what only a leaf can do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.weights.windows.stand_in_class import data_was_taken, forget_data_taken, like_host


class Special(nn.Parameter):
    pass


@pytest.fixture
def host() -> nn.Parameter:
    parameter = Special(torch.ones(2))
    parameter.mark = "of before"
    return parameter


@pytest.fixture
def stand_in(host: nn.Parameter) -> torch.Tensor:
    return like_host(host * 1, host)


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


def test_what_only_a_leaf_can_do_is_refused_in_one_line(stand_in: torch.Tensor):
    def freeze() -> None:
        stand_in.requires_grad = False

    def set_gradient() -> None:
        stand_in.grad = None

    for use, what in (
        (lambda: stand_in.grad, "is asked for its gradient"),
        (set_gradient, "is asked for its gradient"),
        (freeze, "is frozen or unfrozen"),
        (lambda: stand_in.requires_grad_(False), "is frozen or unfrozen"),
        (lambda: stand_in.register_hook(print), "gets a hook on its gradient"),
        (lambda: stand_in.register_post_accumulate_grad_hook(print), "gets a hook on its gradient"),
    ):
        with pytest.raises(RuntimeError, match=f"^a weight that streams {what} inside a forward: do it before"):
            use()
    assert stand_in.requires_grad_(True) is stand_in
    stand_in.retain_grad()
