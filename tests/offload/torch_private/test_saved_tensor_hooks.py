"""Hooks on saved tensors work inside each other, and report writes in place as autograd does."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from offload.torch_private.saved_tensor_hooks import (
    Hooks,
    Kept,
    PackHook,
    Passed,
    active_hooks,
    beneath_claims,
    check_version,
    claimed,
    counting_checkpoint,
    leave_weights_uncounted,
)


def pair(name: str, outer: Hooks | None = None, claims=None) -> Hooks:
    """Hooks that pack a tensor with a name."""

    def pack(tensor):
        return (name, tensor)

    pack.outer = outer
    if claims is not None:
        pack.claims = claims
    return pack, lambda packed: packed[1]


def test_a_kept_tensor_is_the_tensor_without_its_graph():
    tensor = torch.ones(3, requires_grad=True).exp()
    found = Kept.of(tensor).checked()
    assert found.data_ptr() == tensor.data_ptr()
    assert found.grad_fn is None


def test_a_kept_tensor_that_was_modified_is_reported():
    tensor = torch.ones(3)
    kept = Kept.of(tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: a torch.float32 tensor of shape \(3,\)"):
        kept.checked()


def test_the_message_names_both_versions():
    check_version(3, 3, torch.int64, torch.Size([2, 2]))
    with pytest.raises(RuntimeError, match=r"torch.int64 tensor of shape \(2, 2\) is at version 4, saved at version 3"):
        check_version(4, 3, torch.int64, torch.Size([2, 2]))


def test_a_passed_tensor_goes_through_the_other_hooks_and_back():
    tensor = torch.ones(3)
    passed = Passed.to(pair("other"), tensor)
    assert passed.packed == ("other", tensor)
    assert passed.unpack(passed.packed) is tensor


def test_the_active_hooks_are_the_innermost():
    assert active_hooks() is None
    outer, inner = pair("outer"), pair("inner")
    with saved_tensors_hooks(*outer):
        with saved_tensors_hooks(*inner):
            assert active_hooks() == inner
        assert active_hooks() == outer
    assert active_hooks() is None


def test_hooks_that_only_claim_are_looked_through():
    outside = pair("outside")
    claiming = pair("claiming", outside, claims=lambda tensor: False)
    twice = pair("claiming again", claiming, claims=lambda tensor: False)
    assert beneath_claims(None) is None
    assert beneath_claims(outside) is beneath_claims(claiming) is beneath_claims(twice) is outside
    assert beneath_claims(pair("claiming", None, claims=lambda tensor: False)) is None


def test_a_tensor_is_claimed_by_any_of_the_claiming_hooks():
    first, second = torch.ones(1), torch.ones(2)
    outer = pair("outer", None, claims=lambda tensor: tensor is first)
    inner = pair("inner", outer, claims=lambda tensor: tensor is second)
    assert claimed(inner, first)
    assert claimed(inner, second)
    assert not claimed(inner, torch.ones(3))
    assert not claimed(None, first)
    # Hooks that do not claim hide the ones outside of them.
    assert not claimed(pair("hiding", inner), first)


def test_a_pack_hook_has_the_attributes_that_it_is_given():
    plain = PackHook(lambda tensor: ("packed", tensor), "me")
    assert plain(1) == ("packed", 1)
    assert plain.owner == "me"
    assert not hasattr(plain, "claims")
    claiming = PackHook(plain, "other", pair("outer"), lambda tensor: tensor == 2)
    hooks = claiming, None
    assert beneath_claims(hooks) == claiming.outer
    assert (claimed(hooks, 1), claimed(hooks, 2)) == (False, True)


def test_a_checkpoint_is_known_in_forward_and_recompute_unless_it_does_without_weights():
    x, seen = torch.ones(2, requires_grad=True), []

    def look(x: torch.Tensor, without: bool) -> torch.Tensor:
        if without:
            leave_weights_uncounted()
        hooks = active_hooks()
        claiming = pair("claiming", hooks, claims=lambda tensor: False)
        seen.append((counting_checkpoint(hooks) is hooks, counting_checkpoint(claiming) is hooks))
        assert counting_checkpoint(pair("hiding", hooks)) is None
        return x.exp()

    checkpoint(look, x, False, use_reentrant=False).sum().backward()
    assert seen == [(True, True)] * 2
    checkpoint(look, x, True, use_reentrant=False).sum().backward()
    assert seen[2:] == [(False, False)] * 2
    leave_weights_uncounted()
    assert counting_checkpoint(active_hooks()) is None
