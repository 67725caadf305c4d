"""Shares of a step: their sum is the step of one device, with its random numbers."""

from __future__ import annotations

import copy

import torch
from torch import nn

from offload.modes.none import Resident
from tests.training.test_loop import Bigram, batch
from training.batches import split_into
from training.loop import forward_backward
from training.parallel.ranks import ALONE, Share
from training.tasks.causal_lm import CausalLM


def compute(model: nn.Module, share: Share, microbatches: int):
    return forward_backward(CausalLM(), Resident(), model, share, microbatches, 0, 1).sum()


def test_shares_have_the_dropout_and_the_weights_of_their_place_in_the_step():
    whole = Bigram(dropout=0.5)
    ranks = copy.deepcopy(whole)
    loss = compute(whole, ALONE.hand_out(1, batch(5), 2), 2)
    first, second = split_into(batch(5), 2)
    losses = [compute(ranks, Share(first, 5, 0), 1), compute(ranks, Share(second, 5, 1), 1)]
    assert torch.equal(loss, torch.stack(losses).sum())
    for one, other in zip(whole.parameters(), ranks.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_one_device_computes_all_and_adds_nothing():
    share = ALONE.hand_out(3, batch(5), 2)
    assert (share.examples, share.first, len(share.batch)) == (5, 0, 5)
    assert ALONE.hand_out_evaluation([1, 2]) == [1, 2]
    assert ALONE.collect_evaluation(None) is None
    norms = {}
    assert ALONE.reduce(nn.Linear(1, 1), norms) is norms
    assert ALONE.measured({"a": 1.0}) == [{"a": 1.0}]
    assert ALONE.agreed(0.5) == 0.5
    assert ALONE.total(torch.tensor([1.0, 2.0])) == 3
