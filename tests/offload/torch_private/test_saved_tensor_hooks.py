"""Hooks on saved tensors work inside each other, and report writes in place as autograd does."""

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from offload.torch_private import saved_tensor_hooks
from offload.torch_private import torch_internals as internals
from offload.torch_private.saved_tensor_hooks import (
    Hooks,
    Kept,
    PackHook,
    Passed,
    active_hooks,
    beneath_claims,
    check_version,
    check_what_is_kept,
    claimed,
    counting_checkpoint,
    function_contexts,
    here,
    hidden_from_selective_checkpoints,
    leave_weights_uncounted,
    watch_contexts,
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


class Shown:
    """Notes what checkpoints keep, and refuses it where it is told to."""

    def __init__(self):
        self.seen: list[tuple[str, list[float]]] = []
        self.refuses = False

    def check_kept(self, operation: str, result: torch.Tensor) -> None:
        if self.refuses:
            raise ValueError(f"{operation} is kept")
        self.seen.append((operation, result.tolist()))


@pytest.fixture(autouse=True)
def shown() -> Shown:
    made = Shown()
    check_what_is_kept(made)
    return made


def selective(inside: Callable[[], None], *saved: object) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function in a selective checkpoint that keeps the results of the operations `saved`, and calls `inside`."""

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        inside()
        return x.cos().exp()

    contexts = partial(create_selective_checkpoint_contexts, list(saved))
    return lambda x: checkpoint(run, x, use_reentrant=False, context_fn=contexts)


def test_selective_checkpoints_do_not_see_what_is_hidden_from_them():
    numbers = iter(range(10))

    def other_work() -> None:
        assert here.depth == 1
        with Seeing() as seeing, hidden_from_selective_checkpoints():
            # Not the same in forward and in the recompute.
            for _ in range(next(numbers)):
                torch.ones(2).neg_().tan()
        assert len(seeing.names) == 3 * (next(numbers) - 1)

    class Seeing(internals.TorchDispatchMode):
        """Another mode goes on seeing it."""

        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    selective(other_work, torch.ops.aten.sin.default, torch.ops.aten.neg_.default)(x).sum().backward()
    assert here.depth == 0
    expected = torch.ones(2, requires_grad=True)
    expected.sin().cos().exp().sum().backward()
    assert torch.equal(x.grad, expected.grad)
    assert next(numbers) == 4
    assert hidden_from_selective_checkpoints() is internals.NO_CONTEXT


def test_what_a_selective_checkpoint_keeps_is_shown_when_its_forward_ends(shown: Shown):
    def look() -> None:
        assert internals.is_checkpoint_pack(internals.innermost_saved_tensor_hooks(True)[0])
        assert not shown.seen or here.depth == 1

    x = torch.zeros(2, requires_grad=True)
    function = selective(look, torch.ops.aten.sin.default)
    function(x).sum().backward()
    assert shown.seen == [("aten.sin.default", [0.0, 0.0])], "and not again in the recompute"
    assert not internals.is_checkpoint_pack(look)
    shown.refuses = True
    with pytest.raises(ValueError, match=r"aten\.sin\.default is kept"):
        function(x)
    assert here.depth == 0


def test_checks_end_with_their_object():
    made = weakref.ref(kept := Shown())
    check_what_is_kept(kept)
    assert kept in saved_tensor_hooks._checking
    del kept
    assert made() is None


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
    monkeypatch.setattr(saved_tensor_hooks, "_watches", set())
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
