"""Blocks that recompute have the losses, gradients, random states and statistics of blocks that do not."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from offload.activations import checkpointing
from offload.activations.checkpointing import recompute
from offload.torch_private.torch_internals import innermost_saved_tensor_hooks


class Block(nn.Module):
    """Dropout, a keyword, a nested argument, a tuple result; counts its forwards."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.3)
        # In a list: a recompute leaves the attributes of a module as it found them.
        self.forwards: list[None] = []

    @property
    def num_forwards(self) -> int:
        return len(self.forwards)

    def forward(self, x: Tensor, extra: dict[str, Tensor], *, scale: float) -> tuple[Tensor, None]:
        self.forwards.append(None)
        return x + scale * self.dropout(self.down(torch.tanh(self.up(x)))) + extra["shift"], None


class Stack(nn.Module):
    def __init__(self, width: int = 8, depth: int = 3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        shift = x.mean(dim=0)
        for block in self.blocks:
            x, _ = block(x, {"shift": shift}, scale=0.5)
        return x.pow(2).mean()


@pytest.fixture
def models() -> tuple[Stack, Stack]:
    """The same model twice, the second one recomputing."""
    torch.manual_seed(0)
    plain = Stack()
    recomputing = copy.deepcopy(plain)
    recompute(recomputing.blocks)
    return plain, recomputing


def loss_and_gradients(model: Stack, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(x)
    loss.backward()
    return [loss.detach(), torch.rand(1), *(parameter.grad for parameter in model.parameters())]


def test_loss_gradients_and_random_state_are_bitwise_those_without(models: tuple[Stack, Stack]) -> None:
    x = torch.randn(5, 8)
    plain, recomputing = (loss_and_gradients(model, x) for model in models)
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputing, strict=True))
    assert plain[2].abs().sum() > 0


def test_every_block_runs_twice_with_gradients_and_once_without(models: tuple[Stack, Stack]) -> None:
    _, model = models
    model(torch.randn(5, 8)).backward()
    assert [block.num_forwards for block in model.blocks] == [2, 2, 2]
    with torch.no_grad():
        model(torch.randn(5, 8))
    assert [block.num_forwards for block in model.blocks] == [3, 3, 3]


def saved_bytes(model: Stack, x: Tensor) -> int:
    """Returns the bytes that forward saves for backward, without parameters."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    saved = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x)
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    del loss
    return num_bytes


def test_the_memory_of_what_happens_inside_a_block_is_saved() -> None:
    x = torch.randn(32, 64)
    plain = Stack(width=64, depth=4)
    recomputing = copy.deepcopy(plain)
    recompute(recomputing.blocks)
    # Inside a block at least tanh's output (four times the width) is kept; between blocks only their inputs.
    assert saved_bytes(plain, x) > 4 * 4 * x.nbytes
    assert saved_bytes(recomputing, x) <= (4 + 1) * x.nbytes + x[0].nbytes


def test_undo_gives_back_the_forwards_it_found(models: tuple[Stack, Stack]) -> None:
    model, _ = models
    found = [dict(vars(block)) for block in model.blocks]
    own = model.blocks[1].forward = lambda *arguments, **keywords: Block.forward(
        model.blocks[1], *arguments, **keywords
    )
    undo = recompute(model.blocks)
    undo()
    assert vars(model.blocks[0]) == found[0]
    assert vars(model.blocks[1])["forward"] is own
    model(torch.randn(5, 8)).backward()
    assert [block.num_forwards for block in model.blocks] == [1, 1, 1]


def test_a_block_listed_twice_is_wrapped_once(models: tuple[Stack, Stack]) -> None:
    model, _ = models
    undo = recompute([*model.blocks, model.blocks[0]])
    model(torch.randn(5, 8)).backward()
    assert model.blocks[0].num_forwards == 2
    undo()
    assert "forward" not in vars(model.blocks[0])


def test_state_dict_names_do_not_change(models: tuple[Stack, Stack]) -> None:
    plain, recomputing = models
    assert list(plain.state_dict()) == list(recomputing.state_dict())


def leaky_checkpoint(function: Callable, *arguments: object, **options: object) -> object:
    """Opens hooks as the checkpoint of torch 2.11 does, which closes them when the traceback of an error goes."""

    def opened() -> Iterator[None]:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            yield

    generator = opened()
    next(generator)
    result = function(*arguments)
    next(generator, None)
    return result


@pytest.mark.parametrize("checkpoint", [leaky_checkpoint, checkpointing.checkpoint], ids=["2.11", "this torch"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_forward_leaves_no_hooks_open(
    models: tuple[Stack, Stack], monkeypatch: pytest.MonkeyPatch, checkpoint: Callable, error: type[BaseException]
) -> None:
    def fail(*_: object) -> None:
        raise error("here")

    monkeypatch.setattr(checkpointing, "checkpoint", checkpoint)
    _, model = models
    handle = model.blocks[1].down.register_forward_hook(fail)
    with pytest.raises(error, match="here") as caught:
        model(torch.randn(5, 8))
    # The traceback is kept, as a notebook keeps it.
    assert caught.traceback[-1].name == "fail"
    assert innermost_saved_tensor_hooks(True) is None
    handle.remove()
    monkeypatch.undo()
    x = torch.randn(5, 8)
    assert all(map(torch.equal, *(loss_and_gradients(model, x) for model in models)))


def test_an_error_in_the_recompute_reaches_the_caller(models: tuple[Stack, Stack]) -> None:
    _, model = models
    loss = model(torch.randn(5, 8))

    def fail(*_: object) -> None:
        raise ValueError("in the recompute")

    model.blocks[1].down.register_forward_hook(fail)
    with pytest.raises(ValueError, match="in the recompute"):
        loss.backward()
