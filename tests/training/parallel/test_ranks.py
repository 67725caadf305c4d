"""A run on one device, the shares of a step, and who shares the homes of what streams."""

import copy

import pytest
import torch
from torch import nn

from tests.training.helpers.in_process import components_of, composed
from tests.training.run.test_loop import Bigram, batch, on_cpu
from training.batches import examples_in
from training.config.validation import check
from training.errors import UserError
from training.parallel.ranks import ALONE, Share, shares_of
from training.run.loop import forward_backward
from training.tasks.causal_lm import CausalLM


def compute(model: nn.Module, share: Share):
    return forward_backward(CausalLM(), on_cpu(model), share, 0, 1).sum()


def test_shares_have_the_dropout_and_the_weights_of_their_place_in_the_step():
    whole = Bigram(dropout=0.5)
    ranks = copy.deepcopy(whole)
    loss = compute(whole, *shares_of(batch(5), 1, 2, examples_in))
    losses = [compute(ranks, share) for share in shares_of(batch(5), 2, 1, examples_in)]
    assert torch.equal(loss, torch.stack(losses).sum())
    for one, other in zip(whole.parameters(), ranks.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_one_device_computes_all_and_adds_nothing():
    share = ALONE.hand_out(3, shares_of(batch(5), 1, 2, examples_in))
    assert (share.weights, share.total, share.first) == ((3, 2), 5, 0)
    assert torch.equal(torch.cat(share.parts), batch(5))
    assert ALONE.evaluate([1, 2], lambda parts: parts[::-1], "evaluate") == [2, 1]
    norms = {}
    assert ALONE.reduce(nn.Linear(1, 1), norms) is norms
    assert ALONE.measured({"a": 1.0}) == [{"a": 1.0}]
    assert ALONE.agreed(0.5) == 0.5
    assert ALONE.total(torch.tensor([1.0, 2.0])) == 3


def test_another_microbatch_stands_in_for_one_that_weighs_nothing():
    rows = torch.tensor([[0, 0], [1, 2], [0, 0], [0, 0], [0, 0], [3, 0], [0, 0]])
    first, second = shares_of(rows, 2, 2, lambda part: int((part > 0).sum()))
    assert (first.weights, first.total, first.first) == ((2, 0), 3, 0)
    assert (second.weights, second.total, second.first) == ((1, 0), 3, 2)
    # All but the third microbatch are the first: none is computed that has no label.
    assert [part.tolist() for part in (*first.parts, *second.parts)] == [
        rows[:2].tolist(),
        rows[:2].tolist(),
        rows[4:6].tolist(),
        rows[:2].tolist(),
    ]
    assert shares_of(rows[2:5], 1, 1, lambda part: int((part > 0).sum()))[0].total == 0


STREAMED = ("offload=layer_stream", "optimizer=host_adamw")


@pytest.mark.parametrize(
    ("keys", "shares"),
    [
        ((), False),
        (("devices=2",), True),
        (("devices=2", "parallel.homes=own"), False),
        (("devices=2", "parallel.homes=shared"), True),
        (("devices=2", "offload=layer_stream_swap"), True),
        (("devices=2", "offload=tensor_swap"), False),
        (("devices=2", "offload=none", "parallel.homes=shared"), False),
        (("devices=4", "parallel.hosts=2"), True),
        # A rank that is alone on its host has nobody to share with.
        (("devices=2", "parallel.hosts=2"), False),
        # The hosts have two and one.
        (("devices=3", "parallel.hosts=2"), False),
    ],
)
def test_ranks_share_what_streams(keys: tuple[str, ...], shares: bool):
    assert components_of(*STREAMED, *keys).shares_homes == shares


def test_hosts_have_as_many_ranks_where_they_share():
    wrong = r"^parallel.homes=shared with devices=3 on parallel.hosts=2: .* or parallel.homes=own$"
    with pytest.raises(UserError, match=wrong):
        check(composed(*STREAMED, "parallel.homes=shared", "devices=3", "parallel.hosts=2", "plan=true")[0])
