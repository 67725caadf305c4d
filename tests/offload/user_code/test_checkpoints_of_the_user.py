"""Recomputes: selective checkpoints inside an attached model, and arguments that a block adds to."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from tests.offload.helpers.models import Block, Stack, stack_inputs
from tests.offload.helpers.user_code import (
    EVERY_MODE_OR_NONE,
    as_resident,
    descend,
    evaluate,
    recomputed,
    same_as_resident,
    stack_of,
    three_steps,
    train_step,
    under,
)

# Refusals are tried on the CPU alone: torch 2.11 leaves the contexts of a checkpoint open when its function raises.
ON_EVERY_DEVICE = pytest.mark.usefixtures("device")

aten = torch.ops.aten


def saving(*operations: object) -> Callable:
    """Contexts of a checkpoint that keeps the results of `operations`; of all where none is named."""

    def policy(context: object, operation: object, *arguments: object, **keywords: object) -> CheckpointPolicy:
        chosen = not operations or operation in operations
        return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


class Selective(Stack):
    """Blocks in selective checkpoints; `inside`: the checkpoint is within the block's forward."""

    def __init__(self, contexts: Callable, inside: bool):
        super().__init__()
        self.contexts, self.inside = contexts, inside
        if inside:
            for index in range(len(self.blocks)):
                self.blocks[index] = SelectiveInside(16, contexts)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(inputs)
        for block in self.blocks:
            if self.inside:
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=False, context_fn=self.contexts)
        return self.head(hidden)


class SelectiveInside(Block):
    def __init__(self, width: int, contexts: Callable):
        super().__init__(width)
        self.contexts = contexts

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        run = super().forward
        return checkpoint(run, hidden, use_reentrant=False, context_fn=self.contexts)


# The second has operations that the engine's copies are made of.
PRODUCTS = saving(aten.mm.default, aten.addmm.default)
COPIES = saving(aten.copy_.default, aten.fill_.Scalar, aten.clone.default, aten.as_strided.default)


@EVERY_MODE_OR_NONE
@pytest.mark.parametrize("contexts", [PRODUCTS, COPIES], ids=["products", "copies"])
@pytest.mark.parametrize("inside", [False, True])
@ON_EVERY_DEVICE
@pytest.mark.sampled
def test_selective_checkpoints(make: Callable, contexts: Callable, inside: bool):
    def scenario(model: nn.Module, attached) -> list[torch.Tensor]:
        seen = [train_step(model, attached), train_step(model, attached, 1), evaluate(model)]
        with attached.step():
            for microbatch in range(2):
                model(stack_inputs(2, microbatch)).square().mean().backward()
        return [*seen, *(p.grad.clone() for p in model.parameters())]

    same_as_resident(make, scenario, lambda: Selective(contexts, inside))


class Functional(nn.Module):
    """Reads its weight in a selective checkpoint, inside its own forward."""

    def __init__(self, contexts: Callable):
        super().__init__()
        self.weight, self.contexts = nn.Parameter(torch.randn(8, 8) / 3), contexts

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        def run(hidden: torch.Tensor) -> torch.Tensor:
            return torch.tanh(F.linear(hidden, self.weight))

        return checkpoint(run, hidden, use_reentrant=False, context_fn=self.contexts)


def functions(contexts: Callable) -> nn.Module:
    return nn.Sequential(*(Functional(contexts) for _ in range(5)))


@EVERY_MODE_OR_NONE
@ON_EVERY_DEVICE
@as_resident(lambda: functions(PRODUCTS))
def test_a_selective_checkpoint_of_a_function_that_reads_a_weight(model: nn.Module, mode) -> list[torch.Tensor]:
    return [train_step(model, mode), train_step(model, mode, 1), evaluate(model)]


KEEPING = {
    "around": (lambda contexts: Selective(contexts, inside=False), r"blocks\.0\.up\.weight"),
    "inside": (lambda contexts: Selective(contexts, inside=True), r"blocks\.0\.up\.weight"),
    "function": (functions, r"(\d\.|a )weight"),
}


@pytest.mark.parametrize(
    "make", [lambda: BounceLinear(outside="stream", slots=8), LayerStream, lambda: ShardOffload(shards=2)]
)
@pytest.mark.parametrize("contexts", [saving(), saving(aten.t.default)], ids=["all", "transposes"])
@pytest.mark.parametrize("kind", KEEPING)
def test_a_selective_checkpoint_that_keeps_a_weight_is_refused(make: Callable, contexts: Callable, kind: str):
    """It would use the memory of the weight when other weights are there."""
    build, weight = KEEPING[kind]
    model, mode = build(contexts), make()
    message = rf"^a selective checkpoint saves the result of aten\.t\.default, which is a view of {weight}"
    with under(mode, model) as attached:
        with pytest.raises(RuntimeError, match=message) as refused:
            train_step(model, attached)
        assert "\n" not in str(refused.value)
        evaluate(model)


class Layer:
    keys: torch.Tensor | None = None


class KeyCache:
    """Keys by layer, as transformers keep them: a forward appends to them."""

    def __init__(self):
        self.layers = [Layer() for _ in range(4)]

    def update(self, keys: torch.Tensor, index: int) -> torch.Tensor:
        before = self.layers[index].keys
        self.layers[index].keys = keys if before is None else torch.cat([before, keys])
        return self.layers[index].keys


class StaticCache(KeyCache):
    """Writes to memory of its own."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.keys = torch.zeros(5, 16)

    def update(self, keys: torch.Tensor, index: int) -> torch.Tensor:
        self.layers[index].keys.copy_(keys.detach())
        return self.layers[index].keys + keys


class Attending(Block):
    def __init__(self, width: int, index: int):
        super().__init__(width)
        self.index = index

    def forward(self, hidden: torch.Tensor, cache: KeyCache, seen: list, *, by_name: dict) -> torch.Tensor:
        hidden = super().forward(hidden)
        keys = cache.update(torch.tanh(hidden), self.index)
        seen.append(keys.mean())
        by_name[self.index] = len(by_name)
        return hidden + keys.mean(0) * len(seen)


class WithCache(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attending(16, index) for index in range(4))

    def forward(self, inputs: torch.Tensor, cache: KeyCache | None = None, seen: list | None = None) -> torch.Tensor:
        cache, by_name = cache or KeyCache(), {}
        seen = [] if seen is None else seen
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = block(hidden, cache, seen, by_name=by_name)
        assert len(by_name) == 4
        return self.head(hidden) + sum(seen)


def given(model: nn.Module, attached) -> list[torch.Tensor]:
    """An addition of forward to its arguments is there after forward, and none comes with backward."""
    found = []
    for number in range(2):
        cache, seen = KeyCache(), []
        with attached.step():
            loss = model(stack_inputs(0, number), cache, seen).square().mean()
            loss.backward(retain_graph=number == 1)
            if number == 1:
                loss.backward()
        found += [loss.detach(), *(layer.keys.detach() for layer in cache.layers), *(mean.detach() for mean in seen)]
        found += [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
    cache = KeyCache()
    with torch.no_grad():
        found += [model(stack_inputs(1, number), cache, []) for number in range(2)]
    return [*found, *(layer.keys for layer in cache.layers)]


@EVERY_MODE_OR_NONE
@ON_EVERY_DEVICE
def test_a_cache_and_a_list_that_blocks_add_to(make: Callable):
    same_as_resident(make, given, WithCache)


@pytest.mark.parametrize("make", [Resident, LayerStream])
@ON_EVERY_DEVICE
@as_resident(WithCache)
def test_a_cache_and_a_list_that_recomputed_blocks_add_to(model: nn.Module, mode) -> list[torch.Tensor]:
    with recomputed(model, mode):
        return given(model, mode)


def test_a_cache_that_is_written_to_in_place_is_refused():
    model, mode = WithCache(), ShardOffload(shards=2)
    with under(mode, model) as attached:
        message = "forward wrote to the tensors of a StaticCache in place, .* call the model with use_cache=False"
        with pytest.raises(RuntimeError, match=message), attached.step():
            model(stack_inputs(0, 0), StaticCache()).sum().backward()
        evaluate(model)


class Penalised(Block):
    """Takes a gradient inside its forward, of which its result is made."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(super().forward(hidden))
        if not torch.is_grad_enabled():
            return hidden
        (slope,) = torch.autograd.grad(hidden.sum(), self.up.weight, create_graph=True)
        return hidden + slope.mean()


@pytest.mark.parametrize("make", [Resident, LayerStream, partial(BounceLinear, outside="stream", slots=8)])
@ON_EVERY_DEVICE
@as_resident(stack_of(partial(Penalised, 16)))
def test_a_recomputed_block_that_takes_a_gradient(model: nn.Module, mode) -> list[torch.Tensor]:
    """The gradient needs the block's activations before its forward has ended: it is computed again inside it."""
    with recomputed(model, mode):
        return three_steps(model, mode)


class EndsFrozen(nn.Module):
    """Changes a buffer after the last tensor, other than frozen weights, that backward needs.

    `trains`: a part before that has such tensors.
    """

    def __init__(self, trains: bool):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), nn.Tanh()) if trains else nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)
        self.register_buffer("count", torch.tensor(0.0))
        for frozen in (self.last,) if trains else (self.first, self.last):
            frozen.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        self.count += 1
        return self.last(hidden) + self.count


class EndsSaved(EndsFrozen):
    """Saves an activation after the change of the buffer."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(hidden))


class Around(nn.Module):
    """A block that calls `part` in a checkpoint."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part, self.rest = part, Block(16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.rest(checkpoint(self.part, hidden, use_reentrant=False))


def checkpointed(part: Callable[[], nn.Module], inside: bool) -> Stack:
    """Blocks in checkpoints around them, or with checkpoints `inside` them."""
    model = Stack(recompute=None if inside else "non-reentrant")
    model.blocks = nn.ModuleList(Around(part()) if inside else part() for _ in range(4))
    return model


def accumulated(model: nn.Module, attached) -> list[torch.Tensor]:
    """Two steps of two microbatches, the second through a graph that is kept."""
    found = []
    for step in range(2):
        with attached.step():
            for microbatch in range(2):
                loss = model(stack_inputs(step, microbatch)).square().mean()
                loss.backward(retain_graph=step == 1)
                if step == 1:
                    loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        found += [buffer.clone() for buffer in model.buffers()]
        descend(model)
    return found


PARTS = {
    "trains, then frozen": partial(EndsFrozen, True),
    "frozen": partial(EndsFrozen, False),
    "an activation last": partial(EndsSaved, True),
}


@EVERY_MODE_OR_NONE
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
@ON_EVERY_DEVICE
@pytest.mark.sampled
def test_a_buffer_changes_as_often_as_under_torch(make: Callable, part: Callable[[], nn.Module], inside: bool):
    """A recompute goes as far as torch's, which counts the weights that it saves."""
    same_as_resident(make, accumulated, lambda: checkpointed(part, inside))


@pytest.mark.parametrize("make", [Resident, LayerStream])
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
@ON_EVERY_DEVICE
def test_recomputed_blocks_in_checkpoints_of_the_user(make: Callable, part: Callable[[], nn.Module]):
    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        with recomputed(model, mode):
            return accumulated(model, mode)

    same_as_resident(make, scenario, lambda: checkpointed(part, inside=False))
