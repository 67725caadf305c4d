"""Gradients of sharers are summed inside backward where all have them, and go home one by one where they have not."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from offload.knobs import KnobError
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import AttachOptions
from offload.planning.simulated_streams import PlannedSharers
from offload.sharing.summing import WAITING_UNITS
from offload.streams.stream_checker import CheckedStreams
from offload.weights.gradients.seams import Updates
from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.shared_training import EARLY, MODES, STEPS, compared, same_norm
from tests.offload.helpers.sharers import ThreadSharers, as_sharers


@pytest.fixture(autouse=True)
def one_core() -> None:
    """As in the threads of sharers: sums over several cores are others."""
    torch.set_num_threads(1)


class Experts(nn.Module):
    """A block of which each sharer uses one branch, and both the last layer."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor, number: int) -> torch.Tensor:
        return self.last(self.branches[number](hidden))


class Router(nn.Module):
    def __init__(self, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(depth))

    def forward(self, hidden: torch.Tensor, number: int) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, number)
        return hidden


class Landed(Updates):
    """Notes the units whose gradients are handed to updates."""

    early = True

    def __init__(self):
        self.units: list[str] = []

    def gradients_landed(self, unit, tensors, after, released=None) -> None:
        self.units.append(unit.name)


def streams() -> CheckedStreams:
    return CheckedStreams(torch.device("cpu"))


def test_a_gradient_that_a_sharer_lacks_keeps_its_unit_from_the_sum():
    """More units than may wait are incomplete: these are given up in the step, the others at its end."""
    torch.manual_seed(0)
    state = Router(WAITING_UNITS + 2).state_dict()

    def work(sharers: ThreadSharers) -> dict[str, tuple[bool, torch.Tensor | None]]:
        model, mode = Router(WAITING_UNITS + 2), LayerStream(layers="layers", slots=2)
        model.load_state_dict(state)
        attached = mode.attach(model, streams(), AttachOptions(sharers=sharers))
        updates = Landed()
        attached._streamer.use_updates(updates)
        with attached.step():
            attached.accumulate([lambda: model(torch.ones(2, 4), sharers.rank).sum()])
        assert not attached.summed_parameters()
        # An update would use the gradient of this sharer alone.
        assert updates.units == []
        attached.detach()
        return {name: p.grad for name, p in model.named_parameters()}

    for rank, found in enumerate(as_sharers(2, work)):
        model = Router(WAITING_UNITS + 2)
        model.load_state_dict(state)
        model(torch.ones(2, 4), rank).sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                assert found[name] is None
            else:
                assert torch.equal(found[name], parameter.grad)


def test_gradients_of_several_microbatches_are_the_sharer_s_own():
    # Made once: threads share the random numbers.
    first = Stack(depth=2)

    def work(sharers: ThreadSharers) -> bool:
        model, alone, mode = copy.deepcopy(first), copy.deepcopy(first), LayerStream(slots=2)
        attached = mode.attach(model, streams(), AttachOptions(sharers=sharers))

        def loss_of(model: nn.Module, microbatch: int) -> torch.Tensor:
            return model(stack_inputs(sharers.rank, microbatch)).square().mean()

        with attached.step(norms=True):
            attached.accumulate([partial(loss_of, model, microbatch) for microbatch in range(2)])
        for microbatch in range(2):
            loss_of(alone, microbatch).backward()
        assert not attached.summed_parameters()
        # They are not norms of sums.
        assert not attached.gradient_norms()
        attached.detach()
        return all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True))

    assert as_sharers(2, work) == [True, True]


def on_the_host(model: nn.Module, attached: LayerStream, loss: Callable[[], torch.Tensor]) -> None:
    with attached.step():
        attached.accumulate([lambda: loss() + model.blocks[1].norm.weight.square().sum()])


def thaw(model: nn.Module, attached: LayerStream, loss: Callable[[], torch.Tensor]) -> None:
    """The memory of its gradient and of its states is not shared."""
    model.blocks[2].norm.bias.requires_grad_(True)
    with attached.step():
        attached.accumulate([loss])


def add(model: nn.Module, attached: LayerStream, loss: Callable[[], torch.Tensor]) -> None:
    for _ in range(2):
        with attached.step():
            attached.accumulate([loss])


def backward_again(model: nn.Module, attached: LayerStream, loss: Callable[[], torch.Tensor]) -> None:
    """Its gradients would not be in the sums."""
    with attached.step():
        attached.accumulate([loss])
        loss().backward()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (on_the_host, r"a loss uses blocks.1.norm.weight in host memory"),
        (thaw, r"blocks.2.norm.bias trains, and was frozen when processes began to share"),
        (add, r"the gradient of blocks\S+ is a sum over several processes"),
        (backward_again, r"a gradient of blocks\S+ came after the last that was expected: the"),
    ],
)
def test_gradients_that_would_not_be_summed_are_an_error(misuse: Callable, message: str):
    def work(sharers: ThreadSharers) -> None:
        model, mode = Stack(depth=3), LayerStream(slots=2)
        model.blocks[2].requires_grad_(misuse is not thaw)
        attached = mode.attach(model, streams(), AttachOptions(sharers=sharers))
        misuse(model, attached, lambda: model(stack_inputs(0, sharers.rank)).square().mean())

    with pytest.raises(RuntimeError, match=f"^{message}"):
        as_sharers(2, work)


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize(
    ("hosts", "form", "takes_norms"),
    [(1, {}, True), (1, {"state_dtype": "int8", "master": "stochastic"}, False), (2, {}, False)],
    ids=str,
)
@pytest.mark.parametrize(("name", "count", "dtype", "device_share"), EARLY, ids=str)
@pytest.mark.sampled
def test_released_sums_are_those_that_are_kept(
    name: str, count: int, dtype: torch.dtype, device_share: int, hosts: int, form: dict[str, str], takes_norms: bool
):
    options = {"early": True, "scale": 1.0, "device_share": device_share, "takes_norms": takes_norms, **form}
    one, several = compared(MODES[name], dtype, count, hosts, releases=True, **options)
    for sharer in several:
        assert sharer["begun"] == [True] * STEPS
        assert len(sharer["sums"]) == len(one["weights"])
        if takes_norms:
            assert all(map(same_norm, sharer["norms"].values(), one["norms"].values()))


class Choosing(nn.Module):
    """Each input takes one of two ways through each block: of the sharers none, some or all lack its gradients."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(3))
        for block in self.blocks:
            block.forward = partial(self.chosen, block)

    @staticmethod
    def chosen(ways: nn.ModuleList, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + ways[int(hidden.sum() > 0)](hidden)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_released_gradient_that_one_sharer_lacks_is_summed_after_backward(dtype: torch.dtype):
    torch.manual_seed(0)
    model = Choosing().to(dtype)
    _, several = compared(lambda: LayerStream(slots=2, layers="blocks"), model, 3, early=True, scale=1.0, releases=True)
    # In the last step.
    assert {len(sharer["sums"]) for sharer in several} == {2}


def test_sums_of_experts_are_not_released():
    model = nn.ModuleList([nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4)])}), nn.Linear(4, 4)])
    options = AttachOptions(sharers=PlannedSharers(2), release_gradients=True)
    named = "one of the processes that share 0.experts.0.weight has no gradient of it where no token uses the expert"
    with pytest.raises(KnobError, match=rf"^gradients=release: {named}: take keep$"):
        BounceLinear().attach(model, CheckedStreams(torch.device("cpu")), options)
    kept = BounceLinear().footprint(model, options=AttachOptions(sharers=PlannedSharers(2)))
    assert kept.why_gradients_stay == named
