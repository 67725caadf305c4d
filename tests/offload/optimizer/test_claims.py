"""Claims: updates of one parameter each, taken now and applied later, beside the parameter or elsewhere."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.claims import Claim, update_elsewhere, update_in_place
from offload.optimizer.formats import StateFormat
from offload.optimizer.kernels import FusedUpdate
from offload.optimizer.operands import HyperParameters
from offload.optimizer.states import States
from tests.offload.helpers.kernels import FEW
from tests.offload.helpers.models import attached, with_copy
from tests.offload.helpers.optimizers import SETTINGS, give_gradients, parameters, same, train
from tests.offload.helpers.updates import Mixed, host_adamw, made, one_step


def test_a_claim_is_applied_later_as_it_was_taken():
    now, later = parameters(), parameters()
    train(HostAdamW(now, **SETTINGS, threads=1), now, range(1))
    optimizer = HostAdamW(later, **SETTINGS, threads=1)
    give_gradients(later, 0)
    claims = optimizer.claim(later)
    before = [weight.detach().clone() for weight in later]
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 7.0
    assert same(later, before)
    thread = threading.Thread(target=optimizer.apply, args=(claims,))
    thread.start()
    thread.join()
    assert same(now, later)


def claimed(weight: nn.Parameter, format: StateFormat, placed: bool) -> tuple[Claim, dict[str, torch.Tensor]]:
    """A claim of the parameter's first update, and its state."""
    states = States(format, defaultdict(dict))
    if placed:
        states.place([weight], torch.device("cpu"))
    (state,) = states.begin([weight])
    gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    return Claim(weight, gradient, HyperParameters(1e-2, 0.9, 0.95, 1e-8, 0.1), format, 5), state


@pytest.mark.parametrize("format", FEW, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_elsewhere_gives_the_weight_that_one_in_place_writes(
    dtype: torch.dtype, transposed: bool, format: StateFormat
):
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    start = start.t() if transposed else start
    here, there = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    claim, state = claimed(here, format, placed=False)
    update_in_place(claim, state, FusedUpdate(), 0.5, [range(here.numel())])
    claim, state = claimed(there, format, placed=True)
    new = update_elsewhere(claim, state, claim.gradient, FusedUpdate(), scale=0.5)
    assert not torch.equal(here, start)
    assert torch.equal(there, start)
    assert new.dtype == dtype
    assert torch.equal(new, here)


def test_a_scale_that_comes_after_updates_is_refused_and_the_step_can_be_ended():
    """It would reach the updates alone that have not begun."""
    ours, theirs = with_copy(made(Mixed))
    for model, early in ((ours, True), (theirs, False)):
        mode = BounceLinear()
        with attached(mode, model):
            optimizer = host_adamw(model)
            mode.overlap(optimizer, early)
            for step in range(3):
                one_step(model, mode, step)
                if early and optimizer.has_begun:
                    with pytest.raises(RuntimeError, match=r"^step\(scale=0\.5\): .* let updates begin after backward"):
                        optimizer.step(scale=0.5)
                assert optimizer.has_begun == (early and step > 0)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.finish()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
