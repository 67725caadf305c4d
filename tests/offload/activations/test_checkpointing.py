"""Blocks that recompute have the losses, gradients, random states and statistics of blocks that do not."""

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from offload.activations import checkpointing
from offload.activations.checkpointing import CacheBefore, recompute
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


class Layer:
    def __init__(self, keys: torch.Tensor):
        self.keys = keys


class KeyCache:
    def __init__(self, *extra: object):
        self.layers = [Layer(torch.zeros(2)), Layer(torch.ones(2, requires_grad=True) * 2)]
        self.extra = extra


def test_each_copy_is_the_cache_as_it_was_with_the_same_tensors():
    module, parameter = nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    cache = KeyCache(module, parameter, KeyCache, len, test_each_copy_is_the_cache_as_it_was_with_the_same_tensors)
    keys = [layer.keys for layer in cache.layers]
    before = CacheBefore.of(cache)
    cache.layers.append(Layer(torch.zeros(3)))
    cache.layers[0].keys = torch.cat([keys[0], keys[0]])
    for _ in range(2):
        again = before.again()
        assert type(again) is KeyCache
        assert again is not cache
        assert [layer.keys is tensor for layer, tensor in zip(again.layers, keys, strict=True)] == [True, True]
        assert all(one is other for one, other in zip(again.extra, cache.extra, strict=True))
        again.layers.clear()


def test_tensors_that_were_written_to_are_noticed():
    cache = KeyCache()
    before = CacheBefore.of(cache)
    cache.layers[0].keys.add_(1)
    with pytest.raises(RuntimeError, match=r"tensors of a KeyCache in place.* use_cache=False$") as refused:
        before.again()
    assert "\n" not in str(refused.value)


def test_what_is_no_cache_is_passed_on():
    class Progress:
        """Not a cache, and nothing to copy."""

        def __init__(self):
            self.lock = threading.Lock()

        def update(self) -> None: ...

    for argument in (
        torch.ones(2),
        nn.Linear(2, 2),
        nn.ModuleDict(),
        3,
        None,
        "text",
        Layer(torch.ones(2)),
        Progress(),
    ):
        assert CacheBefore.of(argument) is argument
    assert isinstance(CacheBefore.of({1, 2}), CacheBefore)


def test_a_cache_that_cannot_be_copied_is_refused_in_one_line():
    with pytest.raises(
        RuntimeError, match=r"KeyCache, which cannot be copied \(TypeError: .* use_cache=False$"
    ) as refused:
        CacheBefore.of(KeyCache(threading.Lock()))
    assert "\n" not in str(refused.value)


def test_tensors_made_in_inference_mode_have_no_version():
    with torch.inference_mode():
        cache = KeyCache()
    assert CacheBefore.of(cache).again().layers[0].keys is cache.layers[0].keys
