"""The private names of torch that tell the engine of activation checkpoints are there and do what it needs them for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from offload.torch_private import torch_internals as internals


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
        assert internals.is_in_selective_checkpoint()
        with Seeing() as seeing, internals.unseen_by_selective_checkpoints():
            assert not internals.is_in_selective_checkpoint()
            # Not the same in forward and in the recompute.
            for _ in range(next(numbers)):
                torch.ones(2).neg_().tan()
        assert internals.is_in_selective_checkpoint()
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
    assert not internals.is_in_selective_checkpoint()
    expected = torch.ones(2, requires_grad=True)
    expected.sin().cos().exp().sum().backward()
    assert torch.equal(x.grad, expected.grad)
    assert next(numbers) == 4


def test_what_a_selective_checkpoint_keeps_is_listed_and_its_hooks_are_known():
    found = []

    def look() -> None:
        assert internals.is_checkpoint_pack(internals.innermost_saved_tensor_hooks(True)[0])
        found.append([(name, value.tolist()) for name, value in internals.selectively_saved()])

    x = torch.zeros(2, requires_grad=True)
    selective(look, torch.ops.aten.sin.default)(x).sum().backward()
    # In forward; in the recompute it has been taken out by then.
    assert found[0] == [("aten.sin.default", [0.0, 0.0])]
    assert list(internals.selectively_saved()) == []
    assert not internals.is_checkpoint_pack(look)
