"""Code that reads weights of modules which it does not call: parents, hooks, custom functions, lists of parameters."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.streams.stream_checker import HostOperandError
from tests.offload.helpers import user_code
from tests.offload.helpers.models import stack_inputs, under
from tests.offload.helpers.user_code import EVERY_MODE, EVERY_MODE_OR_NONE, evaluate, same_as_resident, train_step

pytestmark = pytest.mark.usefixtures("device")


def three_steps(model: nn.Module, mode) -> list[torch.Tensor]:
    return [*(train_step(model, mode, step) for step in range(3)), evaluate(model)]


class Mixer(nn.Module):
    """Computes with the weights of layers that it never calls, as Mamba does with its convolution's."""

    def __init__(self):
        super().__init__()
        self.conv1d = nn.Conv1d(8, 8, 1)
        self.query = nn.Embedding(5, 8)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.full((8,), 0.5))])
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = F.linear(hidden, self.conv1d.weight.squeeze(2), self.conv1d.bias)
        mixed = mixed * self.scales[0] + self.query.weight * self.scales[1]
        # Twice, and a buffer.
        return self.out(torch.tanh(mixed + self.norm(hidden) - self.norm.running_mean) @ self.conv1d.weight[..., 0])


class Mixers(nn.Module):
    """`recompute`: blocks are called through a checkpoint that was there before the mode."""

    def __init__(self, recompute: bool = False):
        super().__init__()
        self.blocks = nn.ModuleList(Mixer() for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.recompute = recompute

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        # Of a module deep inside.
        return self.head(hidden) + self.blocks[1].out.bias.sum()


MODES = {
    "few slots": lambda: BounceLinear(outside="stream", slots=2),
    "many slots": lambda: BounceLinear(outside="stream", slots=12),
    "linear": lambda: BounceLinear(slots=3),
    "blocks": lambda: LayerStream(outside="stream", slots=2),
    "one block": lambda: LayerStream(slots=1),
}
THESE_MODES = pytest.mark.parametrize("make", MODES.values(), ids=MODES.keys())


@THESE_MODES
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_a_parent_reads_the_weights_of_its_children(make: Callable, recompute: bool):
    same_as_resident(make, three_steps, lambda: Mixers(recompute))


@EVERY_MODE
def test_a_parent_reads_in_every_mode(make: Callable):
    same_as_resident(make, three_steps, Mixers)


@EVERY_MODE_OR_NONE
@pytest.mark.parametrize("recompute", [False, True])
def test_inside_a_context_of_a_device(make: Callable, recompute: bool):
    """torch then looks at each operation of the model, the user and the mode."""

    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        with torch.device(user_code.DEVICE):
            return three_steps(model, mode)

    same_as_resident(make, scenario, lambda: Mixers(recompute))


@THESE_MODES
def test_a_reader_inside_a_block_whose_forward_is_recomputed_without_its_window(make: Callable):
    """A checkpoint that was applied before the mode calls the forward that the block had then."""

    def build() -> nn.Module:
        model = Mixers()
        for block in model.blocks:
            own = block.forward
            block.forward = lambda hidden, own=own: checkpoint(own, hidden, use_reentrant=False)
        return model

    same_as_resident(make, three_steps, build)


@THESE_MODES
def test_hooks_read_weights(make: Callable):
    def build() -> nn.Module:
        model = Mixers()
        model.blocks[0].out.register_forward_pre_hook(lambda module, inputs: inputs[0] * module.weight.mean())
        model.blocks[1].out.register_forward_hook(lambda module, inputs, output: output + module.weight.sum(1))
        model.blocks[2].out.register_full_backward_hook(lambda module, _, outputs: (outputs[0] @ module.weight,))
        model.register_forward_pre_hook(lambda module, inputs: inputs[0] + module.head.weight.sum(0))
        model.register_forward_hook(lambda module, inputs, output: output * module.blocks[0].out.bias.sum())
        return model

    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        later = model.head.register_forward_hook(lambda module, inputs, output: output * module.weight.mean())
        seen = three_steps(model, mode)
        later.remove()
        return [*seen, *three_steps(model, mode)]

    same_as_resident(make, scenario, build)


@THESE_MODES
def test_a_function_of_the_user_reads_weights_in_backward(make: Callable):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, module):
            ctx.module = module
            return hidden * module.weight.mean()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.module.weight.mean(), None

    class Model(Mixers):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.head(Scaled.apply(hidden, self.blocks[1].out))

    same_as_resident(make, three_steps, Model)


@THESE_MODES
def test_hooks_of_parameters_read_weights_on_the_host(make: Callable):
    def build() -> nn.Module:
        model = Mixers()
        for module in (model.head, model.blocks[1].out):
            module.weight.register_hook(lambda gradient, module=module: gradient + 0.1 * module.weight.detach())
        return model

    same_as_resident(make, three_steps, build)


# With few slots a parent gets a copy, of which a change is refused; see below.
@pytest.mark.parametrize("make", [MODES[name] for name in MODES if name != "few slots"])
def test_a_forward_changes_weights(make: Callable):
    """Weights kept in bounds, as by max-norm layers; some through `.data`, some in place."""

    class Bounded(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
            with torch.no_grad():
                self.bias.clamp_(-0.01, 0.01)
            return super().forward(hidden)

    class Clipped(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            assert isinstance(self.weight, nn.Parameter)
            assert self.weight.__class__.__name__ == "Parameter"
            self.weight.data.clamp_(-0.1, 0.1)
            return super().forward(hidden)

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.table = Bounded(8, 8), nn.Embedding(4, 8, max_norm=0.2)
            self.inner = nn.Linear(8, 4)
            self.frozen = nn.Sequential(Bounded(8, 8), Clipped(8, 8)).requires_grad_(False)
            self.clipped = Clipped(8, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.inner.weight.clamp_(-0.2, 0.2)
            hidden = self.frozen(self.first(hidden)) + self.table(torch.tensor([0, 1, 1, 3, 2]))
            self.clipped.bias.data.mul_(0.5)
            return self.inner(self.clipped(hidden))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Parent()])

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](hidden)

    same_as_resident(make, three_steps, Model)


@THESE_MODES
def test_a_forward_gives_a_weight_its_memory_in_another_order(make: Callable):
    class Turning(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.weight.data = self.weight.data.t()
            # Contiguous, because the product rounds by strides, and what streams keeps its own.
            return F.linear(hidden, self.weight if self.training else self.weight.contiguous(), self.bias)

    def build() -> nn.Module:
        model = Mixers()
        model.blocks[0].out = Turning(8, 8)
        return model

    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        model.eval()
        return [evaluate(model) for _ in range(3)]

    same_as_resident(make, scenario, build)
    model, mode = build(), make()
    # Backward would find another order in the slot than it has saved.
    with under(mode, model) as attached, pytest.raises(RuntimeError, match="has been modified since forward"):
        train_step(model, attached)


def test_a_change_that_would_be_lost_is_refused():
    class Model(Mixers):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.blocks[1].out.weight.clamp_(-0.1, 0.1)
            return super().forward(hidden)

    model, mode = Model(), BounceLinear(outside="stream", slots=1)
    with (
        under(mode, model) as attached,
        pytest.raises(RuntimeError, match=r"blocks.1.out.weight was changed .* give the mode more slots"),
    ):
        train_step(model, attached)


def test_a_weight_that_is_kept_elsewhere_is_named():
    """On a GPU torch refuses to compute with it, on the CPU the stream checker does."""

    class Model(Mixers):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) @ self.kept[0]

    model, mode = Model(), BounceLinear(slots=2)
    model.kept = [model.head.weight]
    with under(mode, model) as attached:
        with pytest.raises(HostOperandError, match=r"head: .* takes it in host memory"):
            train_step(model, attached)
        with pytest.raises(HostOperandError), torch.no_grad():
            model(stack_inputs(0, 0))


def test_arithmetic_of_host_memory_alone_is_the_users_own():
    """Momentum encoders (MoCo) update one half of the model from the other in forward."""

    def build() -> nn.Module:
        class Model(Mixers):
            def forward(self, hidden: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    pairs = zip(self.blocks[0].parameters(), self.blocks[1].parameters(), strict=True)
                    for mine, other in pairs:
                        mine.data = mine.data * 0.9 + other.data * (torch.ones(1, device=other.device) * 0.1)
                return super().forward(hidden)

        return Model()

    for make in MODES.values():
        same_as_resident(make, three_steps, build)
