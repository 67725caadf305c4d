"""shard_offload computes the resident model's numbers, for any shards, microbatches and inputs of blocks."""

import functools
import gc
import threading
import weakref
from contextlib import nullcontext
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from offload.modes import shard_offload
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload, cut_evenly, shards_needed
from tests.offload.helpers.models import (
    Stack,
    assert_same,
    normal,
    same_as_resident,
    stack_inputs,
    train,
    under,
    with_copy,
)


@pytest.fixture(autouse=True)
def small_boundaries_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_offload, "MIN_BOUNDARY_BYTES", 1)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(("checkpoint", "boundary"), [(True, "host"), (True, "device"), (False, "host")])
@pytest.mark.parametrize("shards", [1, 3, 4])
def test_equals_resident(shards: int, checkpoint: bool, boundary: str, microbatches: int):
    mode = ShardOffload(shards=shards, checkpoint=checkpoint, boundary=boundary)
    same_as_resident(Stack(dropout=0.3), mode, microbatches=microbatches, steps=3)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("resident", [0, 2])
def test_equals_resident_with_few_slots_and_resident_shards(slots: int, resident: int):
    same_as_resident(Stack(), ShardOffload(shards=4, slots=slots, resident=resident), microbatches=3)


@pytest.mark.parametrize(
    ("precision", "checkpoint", "microbatches"),
    [(torch.float32, True, 5), (torch.float32, False, 1), (torch.bfloat16, True, 1), (torch.bfloat16, False, 5)],
)
def test_a_sequential_of_linear_layers(precision: torch.dtype, checkpoint: bool, microbatches: int):
    """The model of fairscale's own test, with random inputs, over several steps."""

    layers = [nn.Linear(2, 20), *(nn.Linear(20, 20) for _ in range(10)), nn.Linear(20, 2)]
    model = nn.Sequential(*layers).to(precision)
    mode = ShardOffload(shards=2, checkpoint=checkpoint)
    same_as_resident(model, mode, lambda *place: normal(32, 2)(*place).to(precision), microbatches=microbatches)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(("shards", "slots"), [(1, 1), (2, 1), (6, 2), (None, 3)])
def test_what_is_outside_the_blocks_streams_too(shards: int | None, slots: int, microbatches: int):
    cut = {"shards": shards} if shards else {"shard_bytes": 1}
    mode = ShardOffload(outside="stream", slots=slots, **cut)
    assert mode.footprint(Stack()).resident_bytes == 0
    assert mode.footprint(Stack()).units == (shards or 6)
    same_as_resident(Stack(dropout=0.3), mode, microbatches=microbatches, steps=3)


class Branching(nn.Module):
    """Blocks take keywords, a mask of booleans, integers and nested tuples, and return tuples and dictionaries."""

    class Block(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.inside = nn.Linear(width, width)
            self.memory = nn.Linear(width, width, bias=False)
            self.table = nn.Embedding(4, width)

        def forward(self, state, positions, *, mask, scale):
            hidden, memory = state
            hidden = torch.tanh(self.inside(hidden) * scale["by"] + self.table(positions))
            memory = memory + self.memory(hidden).masked_fill(mask, 0.0)
            return (hidden, memory), {"norm": memory.square().mean()}

    def __init__(self, width: int = 8, depth: int = 4):
        super().__init__()
        self.position = nn.Embedding(5, width)
        self.scale = nn.Parameter(torch.full((width,), 0.2))
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(self.Block(width) for _ in range(depth))})
        self.head = nn.Linear(width, 3)

    def forward(self, inputs):
        first = hidden = inputs + self.position(torch.arange(inputs.shape[0]))
        memory, extra = torch.zeros_like(hidden), 0.0
        scale = {"by": self.scale.exp()}
        positions, mask = torch.arange(inputs.shape[0], dtype=torch.int32) % 4, inputs > 1.0
        for block in self.encoder["layers"]:
            (hidden, memory), found = block((hidden, memory), positions, mask=mask, scale=scale)
            # The model computes between the blocks as well, and uses there a tensor from before the blocks.
            hidden, extra = hidden + 0.1 * first, extra + found["norm"]
        return self.head(hidden + memory) + extra


@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_keywords_masks_integers_and_nested_values(checkpoint: bool, microbatches: int):
    mode = ShardOffload(shards=3, checkpoint=checkpoint)
    same_as_resident(Branching(), mode, normal(5, 8), microbatches=microbatches)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_flow_to_what_trains_upstream(microbatches: int):
    def run(model, mode) -> list[torch.Tensor]:
        upstream = torch.linspace(-1, 1, 40).reshape(5, 8).requires_grad_()
        with under(mode, model) as attached, attached.step():
            prepared = [torch.sin(upstream * (index + 1)) for index in range(microbatches)]
            attached.accumulate([lambda x=x: model(x).square().sum() for x in prepared])
            return [upstream.grad.clone()]

    sharded, resident = with_copy(Stack())
    assert_same(run(sharded, ShardOffload(shards=2)), run(resident, Resident()))


class Tied(Stack):
    """Uses weights at several places: tied between blocks, between stem and head, and of a block that is called twice.

    Their gradients are summed for each microbatch first, as without shards.
    """

    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[3].up.weight = self.blocks[0].up.weight
        self.head = nn.Linear(8, 16)
        self.head.weight = self.stem.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(inputs)
        for index in (0, 1, 2, 0, 3):
            hidden = self.blocks[index](hidden)
        return hidden @ self.head.weight + self.stem(inputs)[:, :8]


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("resident", [0, 1])
def test_frozen_and_tied_weights(resident: int, checkpoint: bool, microbatches: int):
    mode = ShardOffload(shards=3, resident=resident, checkpoint=checkpoint)
    same_as_resident(Tied(), mode, microbatches=microbatches)


def test_modules_hold_their_own_parameters_after_a_step():
    model, mode = Tied(), ShardOffload(shards=2, resident=1)
    held = list(model.parameters())
    with under(mode, model) as attached:
        with attached.step():
            attached.accumulate([lambda i=i: model(stack_inputs(0, i)).mean() for i in range(2)])
        assert all(one is other for one, other in zip(model.parameters(), held, strict=True))
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.sampled
@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("around", ["the microbatches", "each"])
def test_autocast_reaches_every_microbatch(around: str, cache: bool, checkpoint: bool):
    """Casts are not shared: gradients would be added in bfloat16."""

    def autocast(where: str) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=around == where, cache_enabled=cache)

    def run(model, mode) -> list[torch.Tensor]:
        def loss(index: int) -> torch.Tensor:
            with autocast("each") if around == "each" else nullcontext():
                return model(stem(stack_inputs(0, index))).float().square().mean()

        torch.manual_seed(0)
        # No part of the model, so that no mode has a hand in it.
        stem = nn.Linear(8, 8)
        with under(mode, model) as attached, attached.step(), autocast("the microbatches"):
            losses = attached.accumulate([functools.partial(loss, index) for index in range(3)])
        return [*losses, *(p.grad.clone() for p in (*model.parameters(), *stem.parameters()))]

    sharded, resident = with_copy(Stack())
    assert_same(run(sharded, ShardOffload(shards=2, checkpoint=checkpoint)), run(resident, Resident()))


def weight_bytes(mode: ShardOffload, model: nn.Module, microbatches: int) -> float:
    """Returns the bytes of weights that were copied in during the third step."""
    with under(mode, model) as attached:
        for step in range(3):
            before = attached.counters()
            with attached.step():
                batches = [stack_inputs(step, index) for index in range(microbatches)]
                attached.accumulate([lambda batch=batch: model(batch).mean() for batch in batches])
            model.zero_grad()
        after = attached.counters()
    moved = after - before
    return moved.h2d_bytes - moved.activation_h2d_bytes


@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("outside", ["resident", "stream"])
@pytest.mark.parametrize("shards", [2, 3, 4])
@pytest.mark.sampled
def test_weights_come_in_once_each_way_whatever_the_microbatches(shards: int, outside: str, checkpoint: bool):
    def mode() -> ShardOffload:
        return ShardOffload(shards=shards, outside=outside, checkpoint=checkpoint)

    traffic = {count: weight_bytes(mode(), Stack(), count) for count in (1, 2, 5)}
    assert traffic[1] == traffic[2] == traffic[5]
    plan = mode().footprint(Stack())
    # On the turn from forward to backward the slots hold what comes next.
    assert plan.host_weight_bytes <= traffic[5] < plan.h2d_bytes
    assert plan.for_microbatches(5) == plan


def test_boundary_activations_are_on_the_host_between_forward_and_backward():
    copied_out = {}
    for boundary in ("host", "device"):
        model, mode = Stack(), ShardOffload(shards=4, boundary=boundary)
        with under(mode, model) as attached:
            with attached.step():
                loss = model(stack_inputs(0, 0)).mean()
                copied_out[boundary] = attached.counters().activation_d2h_bytes
                loss.backward()
            after = attached.counters()
        assert after.activation_h2d_bytes <= after.activation_d2h_bytes
    assert copied_out == {"host": 4 * 5 * 16 * 4, "device": 0}


def test_an_error_in_one_microbatch_leaves_nothing_behind():
    sharded, resident = with_copy(Stack())
    mode = ShardOffload(shards=2)

    def fails():
        model(stack_inputs(0, 1))
        raise ArithmeticError("of the user")

    model = sharded
    with under(mode, sharded) as attached:
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="of the user"), attached.step():
                attached.accumulate([lambda: model(stack_inputs(0, 0)).mean(), fails])
            assert all(p.grad is None for p in sharded.parameters())
        with attached.step():
            attached.accumulate([lambda i=i: model(stack_inputs(0, i)).mean() for i in range(2)])
        gradients = [p.grad.clone() for p in sharded.parameters()]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lockstep")]
    for index in range(2):
        resident(stack_inputs(0, index)).mean().backward()
    assert_same(gradients, [p.grad for p in resident.parameters()])


def test_nothing_is_left_for_the_garbage_collector():
    """Device memory is freed with the last reference, not when the collector runs."""
    # The first optimizer imports torch's compiler, which leaves the frames of its import to the collector.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    gc.collect()
    gc.disable()
    try:
        model, mode = Stack(), ShardOffload(shards=2)
        train(model, mode, steps=2, microbatches=3)
        left = [weakref.ref(model.blocks[0].up), weakref.ref(model.head)]
        del model, mode
        assert [reference() for reference in left] == [None, None]
    finally:
        gc.enable()


def test_wrong_values_name_the_key_and_the_range():
    for arguments, message in (
        ({"shards": 0}, r"shards=0: must be at least 1"),
        ({"shard_bytes": "many"}, r"shard_bytes=many: must be bytes"),
        ({"boundary": "disk"}, r"boundary=disk: must be host or device"),
        ({"shards": 2, "shard_bytes": "2GiB"}, r"^shards=2: is given beside shard_bytes: give one of"),
    ):
        with pytest.raises(ValueError, match=message):
            ShardOffload(**arguments)
    with pytest.raises(ValueError, match=r"shards=9: must be between 1 and the number of blocks, 4"):
        ShardOffload(shards=9).footprint(Stack())
    with pytest.raises(ValueError, match=r"shards=9: must be between 1 and .* blocks and of modules outside them, 6"):
        ShardOffload(shards=9, outside="stream").footprint(Stack())


def test_shards_are_packed_by_bytes():
    assert ShardOffload(shard_bytes=1).footprint(Stack()).units == 4
    assert ShardOffload().footprint(Stack()).units == 1
    block = sum(p.nbytes for p in Stack().blocks[0].parameters())
    assert ShardOffload(shard_bytes=2 * block + 1).footprint(Stack()).units == 2
    assert ShardOffload(shards=3, include=["blocks.[012]"]).footprint(Stack()).units == 3
    assert ShardOffload(shards=3, exclude=["blocks.*"]).footprint(Stack()).units == 0


def test_a_step_without_microbatches_changes_nothing():
    model = Stack()
    with under(ShardOffload(shards=2), model) as attached:
        with attached.step():
            assert attached.accumulate([]) == []
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("sizes", "count", "lengths"),
    [
        ([100, 1, 1, 1], 3, [1, 1, 2]),
        ([1, 1, 1, 100], 3, [1, 2, 1]),
        ([1] * 10, 3, [3, 3, 4]),
        ([1] * 4, 4, [1, 1, 1, 1]),
        ([5, 5, 1, 1, 8], 2, [2, 3]),
        ([0, 0, 0], 2, [1, 2]),
        ([7], 1, [1]),
    ],
)
def test_shards_are_contiguous_balanced_and_never_empty(sizes, count, lengths):
    runs = cut_evenly(sizes, count)
    assert [len(run) for run in runs] == lengths
    assert [index for run in runs for index in run] == list(range(len(sizes)))


def test_no_other_cut_is_better_balanced():
    sizes = [3, 9, 2, 2, 7, 1, 8, 4]
    for count in range(1, len(sizes) + 1):
        cuts = ((0, *inner, len(sizes)) for inner in combinations(range(1, len(sizes)), count - 1))
        best = min(sum(sum(sizes[a:b]) ** 2 for a, b in pairwise(cut)) for cut in cuts)
        assert sum(sum(sizes[index] for index in run) ** 2 for run in cut_evenly(sizes, count)) == best


def test_a_limit_is_kept_but_for_a_block_that_is_larger():
    sizes = [3, 3, 3, 9, 1]
    count = shards_needed(sizes, 6)
    assert count == 4
    assert [sum(sizes[index] for index in run) for run in cut_evenly(sizes, count, 6)] in ([3, 6, 9, 1], [6, 3, 9, 1])


def test_more_shards_than_blocks_are_refused():
    with pytest.raises(ValueError, match="2 blocks cannot be cut into 3"):
        cut_evenly([1, 1], 3)
