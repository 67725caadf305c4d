"""Blocks whose forward changes buffers train as they do resident, also where backward computes them again."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

from offload.activations.checkpointing import recompute
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Mode
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.torch_private.buffer_states import SMALL_BYTES
from tests.offload.helpers import models, user_code
from tests.offload.helpers.modes import recomputing

WIDTH = 6


class InPlace(nn.Module):
    """Counts its forwards in an integer, and computes with the count."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.tensor(1))

    def forward(self, hidden):
        self.count += 1
        return torch.sin(self.linear(hidden) * self.count)


class Reassigned(InPlace):
    def forward(self, hidden):
        self.count = self.count + 1
        return torch.sin(self.linear(hidden) * self.count)


class OneByte(InPlace):
    """Its state is of a kind that is not copied without need, and changes in every forward."""

    def __init__(self):
        super().__init__()
        self.count = self.count.to(torch.uint8)
        self.register_buffer("flips", torch.tensor([True, False, True, False, True, False]))

    def forward(self, hidden):
        self.flips.logical_not_()
        return super().forward(hidden).masked_fill(self.flips, 0.1)


class Counted(nn.Module):
    """Not in training, as a frozen part may be, and changes its buffer all the same."""

    def __init__(self):
        super().__init__()
        self.part = InPlace().eval()
        self.plain = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return self.part(self.plain(hidden))


class Codebook(nn.Module):
    """Writes through `.data`, which no version counter sees."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden):
        hidden = self.linear(hidden)
        self.mean.data.lerp_(hidden.detach().mean(0).float(), 0.3)
        return torch.tanh(hidden - self.mean)


class FirstForward(nn.Module):
    """Its buffer is None until the first forward sets it from its inputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", None)

    def forward(self, hidden):
        hidden = self.linear(hidden)
        self.scale = hidden.detach().std() if self.scale is None else self.scale * 1.1
        return torch.tanh(hidden / self.scale)


class FromOutside(nn.Module):
    """Changes the buffer of a module inside, whose own forward does not."""

    def __init__(self):
        super().__init__()
        self.inner = InPlace()

    def forward(self, hidden):
        hidden = self.inner.linear(hidden)
        self.inner.count += 1
        return torch.sin(hidden * self.inner.count)


class Twice(nn.Module):
    """Calls one module twice; the second call goes on where the first has ended."""

    def __init__(self, part: Callable[[], nn.Module]):
        super().__init__()
        self.part = part()

    def forward(self, hidden):
        return self.part(hidden) + self.part(hidden)


def normalised(norm: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(), nn.Tanh())


PARTS = {
    "in place": InPlace,
    "reassigned": Reassigned,
    "one byte": OneByte,
    "in eval": Counted,
    "through .data": Codebook,
    "first forward": FirstForward,
    "batch norm": lambda: normalised(lambda: nn.BatchNorm1d(WIDTH)),
    "cumulative batch norm": lambda: normalised(lambda: nn.BatchNorm1d(WIDTH, momentum=None)),
    "batch norm in eval": lambda: normalised(lambda: nn.BatchNorm1d(WIDTH).eval()),
    "spectral norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "new spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "from outside": FromOutside,
    "twice": lambda: Twice(Codebook),
    "batch norm twice": lambda: Twice(lambda: normalised(lambda: nn.BatchNorm1d(WIDTH))),
}
EVERY_PART = pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())


class Stateful(nn.Module):
    def __init__(self, part: Callable[[], nn.Module], depth: int = 3):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(part(), nn.Dropout(0.2)) for _ in range(depth))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


def inputs(step: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    return torch.randn(5, WIDTH, generator=generator).to(user_code.DEVICE)


def same_as_resident(model: nn.Module, mode: Mode, **options) -> None:
    models.same_as_resident(model, mode, inputs, device=user_code.DEVICE, **options)


def made(part: Callable[[], nn.Module]) -> Stateful:
    torch.manual_seed(0)
    return Stateful(part)


@EVERY_PART
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("knobs", [{"shards": 3}, {"shards": 3, "resident": 1}], ids=str)
@pytest.mark.sampled
def test_shard_offload(part: Callable[[], nn.Module], microbatches: int, knobs: dict):
    same_as_resident(made(part), ShardOffload(**knobs), steps=3, microbatches=microbatches)


MODES = {
    "none": Resident,
    "layer_stream": lambda: LayerStream(slots=1),
    "layer_stream_resident": lambda: LayerStream(slots=1, resident=1),
    "bounce_linear": lambda: BounceLinear(outside="stream", slots=3),
    "bounce_linear_resident": BounceLinear,
    "shard_offload": lambda: ShardOffload(shards=3, resident=1, checkpoint=False),
    "tensor_swap": lambda: TensorSwap(Resident()),
    "layer_stream_swap": lambda: TensorSwap(LayerStream()),
}
# bounce_linear cannot see a module that uses what is inside of another: see docs/modes.md.
SEEN = [
    pytest.param(make, part, id=f"{mode}-{name}")
    for mode, make in MODES.items()
    for name, part in PARTS.items()
    if not (name == "from outside" and "bounce" in mode)
]


@pytest.mark.parametrize(("make", "part"), SEEN)
@pytest.mark.sampled
def test_recomputed_blocks_of_every_mode(make: Callable[[], Mode], part: Callable[[], nn.Module]):
    same_as_resident(made(part), recomputing(make()), steps=2, microbatches=2)


@pytest.mark.sampled
@EVERY_PART
def test_recomputes_that_run_to_their_end(part: Callable[[], nn.Module]):
    with set_checkpoint_early_stop(False):
        same_as_resident(made(part), ShardOffload(shards=2), steps=2)


@pytest.mark.parametrize("make", [Resident, LayerStream, partial(ShardOffload, shards=2)])
@pytest.mark.parametrize("part", [InPlace, Codebook])
def test_recomputed_blocks_inside_recomputed_blocks(make: Callable[[], Mode], part: Callable[[], nn.Module]):
    def blocks_of(model: Stateful) -> list[nn.Module]:
        inside = [inner for block in model.blocks for inner in block[0]]
        return inside if mode.recomputes else [*inside, *model.blocks]

    model, mode = made(lambda: nn.Sequential(part(), part())), make()
    same_as_resident(model, recomputing(mode, blocks_of), steps=2)


@pytest.mark.parametrize("part", [InPlace, Codebook, PARTS["new spectral norm"]])
def test_a_backward_that_runs_twice_changes_nothing_either_time(part: Callable[[], nn.Module]):
    model = made(part).to(user_code.DEVICE)
    twin = copy.deepcopy(model)
    recompute(model.blocks)
    for one in (model, twin):
        torch.manual_seed(0)
        loss = one(inputs(0, 0)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(map(torch.equal, (p.grad for p in model.parameters()), (p.grad for p in twin.parameters())))
    assert all(map(torch.equal, model.buffers(), twin.buffers()))


def test_a_copy_of_a_recomputing_model_is_right_as_well():
    plain = made(InPlace).to(user_code.DEVICE)
    model = copy.deepcopy(plain)
    recompute(model.blocks)
    twin = copy.deepcopy(model)
    for one in (plain, twin):
        torch.manual_seed(0)
        one(inputs(0, 0)).square().mean().backward()
    assert all(map(torch.equal, (p.grad for p in twin.parameters()), (p.grad for p in plain.parameters())))
    assert all(map(torch.equal, twin.buffers(), plain.buffers()))
    assert [buffer.item() for buffer in model.buffers()] == [1, 1, 1]
    assert [buffer.item() for buffer in twin.buffers()] == [2, 2, 2]


def test_an_error_in_a_forward_or_a_recompute_leaves_the_buffers_right():
    class Fails(InPlace):
        fails_at = 0
        calls = 0

        def forward(self, hidden):
            type(self).calls += 1
            hidden = super().forward(hidden)
            if self.calls == self.fails_at:
                raise ArithmeticError("of the user")
            return hidden

    for fails_at, count in ((1, 2), (2, 2)):
        Fails.calls, Fails.fails_at = 0, fails_at
        model = Stateful(Fails, depth=1).to(user_code.DEVICE)
        undo = recompute(model.blocks)
        with pytest.raises(ArithmeticError, match="of the user"):
            model(inputs(0, 0)).sum().backward()
        assert model.blocks[0][0].count.item() == count
        undo()


@pytest.mark.parametrize("make", [partial(ShardOffload, shards=2), LayerStream])
def test_under_autocast(make: Callable[[], Mode]):
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Sequential(Codebook(), normalised(lambda: nn.BatchNorm1d(WIDTH)))

        def forward(self, hidden):
            with torch.autocast(user_code.DEVICE, dtype=torch.bfloat16):
                return self.part(hidden).float()

    same_as_resident(made(Cast), recomputing(make()), steps=2)


class Masked(nn.Module):
    """A block with a mask that is too large to be copied without need."""

    def __init__(self, changes: bool = False):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.rand(WIDTH * SMALL_BYTES) > 0.5)
        self.changes = changes

    def forward(self, hidden):
        if self.changes:
            self.mask.logical_not_()
        return self.linear(hidden).masked_fill(self.mask[: hidden.numel()].view_as(hidden), 0.1)


class LargeClones(TorchDispatchMode):
    """Counts copies that an operation makes of tensors as large as the mask."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.clone.default:
            self.count += args[0].nbytes > SMALL_BYTES
        return function(*args, **(kwargs or {}))


# Shards copy each mask for the two runs of the trial before the first step.
@pytest.mark.parametrize(
    ("make", "of_trial"),
    [(partial(ShardOffload, shards=2), 6), (partial(ShardOffload, resident=1), 6), (LayerStream, 0)],
)
def test_a_large_mask_is_right_and_not_copied(make: Callable[[], Mode], of_trial: int):
    with LargeClones() as clones:
        same_as_resident(made(Masked), recomputing(make()), steps=2)
    assert clones.count == of_trial


def test_a_mask_that_changes_before_backward_is_refused_as_it_is_resident():
    model, mode = made(partial(Masked, changes=True)), ShardOffload(shards=2, checkpoint=False)
    model.eval()
    refused = pytest.raises(RuntimeError, match=r"blocks\.\d\.0\.mask, needed for gradient .* modified since forward")
    with models.under(mode, model, user_code.DEVICE) as attached, attached.step(), refused:
        attached.accumulate([lambda i=i: model(inputs(0, i)).mean() for i in range(2)])


@pytest.mark.parametrize("make", [BounceLinear, LayerStream, lambda: ShardOffload(shards=2)])
def test_recompute_before_a_mode_is_attached_is_refused_for_blocks_with_buffers(make: Callable[[], Mode]):
    """The recompute would run outside of the block's window, and change its buffers a second time."""
    model = models.Stack()
    for block in model.blocks:
        block.register_buffer("calls", torch.zeros(()))
    undo = recompute(model.blocks)
    mode = make()
    with pytest.raises(RuntimeError, match=r"^blocks\.0 has buffers of its own, and recompute\(\) was called before"):
        user_code.under(mode, model).__enter__()
    undo()
    with user_code.under(mode, model) as attached:
        recompute(model.blocks)
        user_code.train_step(model, attached)
