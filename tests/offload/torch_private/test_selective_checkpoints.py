"""A selective checkpoint does not see the engine's work inside of it, and the engine sees what it keeps."""

import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from offload.torch_private import selective_checkpoints
from offload.torch_private import torch_internals as internals
from offload.torch_private.selective_checkpoints import check_what_is_kept, here, hidden_from_selective_checkpoints


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
    assert kept in selective_checkpoints._checking
    del kept
    assert made() is None
