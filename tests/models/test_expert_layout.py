"""The A and B that experts share, in peft's layout: what peft makes of them for each expert is the one."""

import torch

from models.expert_layout import for_each_expert, of_one_expert


def test_peft_reads_the_same_matrix_for_each_expert():
    first, second = torch.randn(2, 5), torch.randn(3, 2)
    whole = for_each_expert(first, torch.Size((8, 5))), for_each_expert(second, torch.Size((3, 8)))
    # As peft's `ParamWrapper.get_delta_factors` reshapes them.
    assert torch.equal(whole[0].reshape(4, -1, 5), first.expand(4, 2, 5))
    assert torch.equal(whole[1].reshape(3, -1, 4).permute(2, 0, 1), second.expand(4, 3, 2))
    assert torch.equal(of_one_expert(whole[0], first.shape), first)
    assert torch.equal(of_one_expert(whole[1], second.shape), second)


def test_matrices_that_differ_between_experts_are_not_one():
    whole = for_each_expert(torch.randn(2, 5), torch.Size((8, 5)))
    whole[7, 4] += 1
    assert of_one_expert(whole, torch.Size((2, 5))) is None
