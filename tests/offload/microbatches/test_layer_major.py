"""Layer-major microbatches: the order of backward, the order of additions to gradients, and one after another."""

import gc
import random
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from offload.microbatches.layer_major import LayerMajor, compute_alike, one_after_another
from offload.torch_private.module_contexts import SideBySideError
from offload.torch_private.torch_internals import innermost_saved_tensor_hooks


class Notes(torch.autograd.Function):
    """The identity; notes its name when backward passes."""

    @staticmethod
    def forward(ctx, x, name, seen):
        ctx.name, ctx.seen = name, seen
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append(ctx.name)
        return gradient, None, None


@pytest.fixture
def layer_major(streams):
    made = LayerMajor(streams)
    yield made
    made.close()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_backward_takes_the_places_in_reverse_and_the_microbatches_in_order(layer_major, count):
    seen = []

    def loss(index):
        x = torch.ones(3, requires_grad=True) * (index + 1)
        for place in range(3):
            layer_major.enter(place)
            for layer in range(2):
                x = Notes.apply(torch.sin(x), (place, layer, index), seen)
        return x.sum()

    losses = layer_major.accumulate([lambda index=index: loss(index) for index in range(count)])
    assert len(losses) == count
    assert not any(value.requires_grad for value in losses)
    assert seen == [(place, layer, index) for place in (2, 1, 0) for index in range(count) for layer in (1, 0)]


def test_gradients_are_added_in_the_order_of_the_microbatches(layer_major):
    # 1e8 swallows a 1 that is added to it alone: another order of the same four numbers has another sum.
    factors = torch.tensor([1e8, 1.0, -1e8, 1.0])
    weight = torch.ones(1, requires_grad=True)

    def loss(index):
        layer_major.enter(0)
        return (weight * factors[index]).sum()

    layer_major.accumulate([lambda index=index: loss(index) for index in range(4)])
    expected = torch.zeros(1)
    for factor in factors:
        expected += factor
    assert torch.equal(weight.grad, expected)


def test_what_trains_upstream_gets_the_gradients_of_all(layer_major):
    upstream = torch.ones(2, requires_grad=True)
    hidden = upstream * 3

    def loss(index):
        layer_major.enter(0)
        return (hidden * (index + 1)).sum()

    layer_major.accumulate([lambda index=index: loss(index) for index in range(3)])
    assert torch.equal(upstream.grad, torch.full((2,), 18.0))


@pytest.mark.parametrize("accumulate", ["one after another", "layer-major"])
@pytest.mark.parametrize("count", [1, 3])
def test_gradients_are_announced_as_final_before_the_first_that_is(layer_major, accumulate: str, count: int):
    weight = torch.ones(1, requires_grad=True)
    landed, final_from = [], []
    weight.register_hook(lambda gradient: landed.append(gradient))

    def loss(index):
        layer_major.enter(0)
        return (weight * (index + 1)).sum()

    function = one_after_another if accumulate == "one after another" else layer_major.accumulate
    losses = [lambda index=index: loss(index) for index in range(count)]
    values = function(losses, before_last=lambda: final_from.append(len(landed)))
    assert [value.item() for value in values] == [index + 1 for index in range(count)]
    assert not any(value.requires_grad for value in values)
    # One after another, only the last microbatch's gradient is final; layer-major, the one sum of all.
    assert final_from == [count - 1 if accumulate == "one after another" else 0]
    assert weight.grad.item() == sum(range(1, count + 1))


def test_gradients_in_pieces_are_added_in_the_order_of_the_microbatches(layer_major):
    """A reentrant checkpoint delivers the gradient of its use by a backward of its own."""
    # As above: 1e8 and -1e8, each swallows the 1 that follows it.
    factors = torch.tensor([[1.0, 1e8], [1.0, -1e8]])
    weight = torch.ones(1, requires_grad=True)

    def loss(index):
        x = torch.ones(1, requires_grad=True)
        for place in range(2):
            layer_major.enter(place)
            factor = factors[index, place]
            x = x + checkpoint(lambda x, factor=factor: x.detach() + weight * factor, x, use_reentrant=True)
        return x.sum()

    layer_major.accumulate([lambda: loss(0), lambda: loss(1)])
    side_by_side, weight.grad = weight.grad, None
    one_after_another([lambda: loss(0), lambda: loss(1)])
    assert torch.equal(side_by_side, weight.grad)
    # Place by place, the sum would be that of the two 1s.
    assert side_by_side.item() != 2


def test_a_layer_that_is_entered_outside_of_a_step_does_not_wait(layer_major):
    layer_major.enter(3)


def test_an_error_in_a_microbatch_reaches_the_caller_and_the_next_step_works(layer_major):
    weight = torch.ones(1, requires_grad=True)

    def loss(fails):
        layer_major.enter(0)
        if fails:
            raise KeyError("here")
        return weight.sum()

    with pytest.raises(KeyError, match="here"):
        layer_major.accumulate([lambda: loss(False), lambda: loss(True)])
    assert weight.grad is None
    layer_major.accumulate([lambda: loss(False)] * 2)
    assert weight.grad.item() == 2


def test_hooks_that_an_aborted_microbatch_leaves_open_are_gone_in_the_next_step(layer_major):
    """torch's module hooks do not close what they have opened where a microbatch is aborted."""
    weight, fails, seen = torch.ones(1, requires_grad=True), True, []

    def loss(index):
        seen.append(innermost_saved_tensor_hooks(True))
        if fails:
            saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor).__enter__()
        layer_major.enter(0)
        if fails:
            raise KeyError("here")
        return weight.sum()

    with pytest.raises(KeyError, match="here"):
        layer_major.accumulate([lambda: loss(0), lambda: loss(1)])
    fails = False
    layer_major.accumulate([lambda: loss(0), lambda: loss(1)])
    assert seen == [None] * 4
    assert innermost_saved_tensor_hooks(True) is None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.calls = nn.Linear(2, 2), nn.BatchNorm1d(2), 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(self.layer(rows)).square().sum()


def alike(net: Net, losses: list[Callable], side_by_side: Callable | None = None) -> bool:
    def versions() -> list[int]:
        return [parameter._version for parameter in net.parameters()]

    together = side_by_side or (lambda losses: [loss() for loss in losses])
    return compute_alike(losses, together, net, torch.device("cpu"), versions)


def test_the_same_numbers_are_alike_and_nothing_is_left():
    net = Net()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    buffers, drawn = dict(net.named_buffers()), (torch.get_rng_state(), random.getstate())

    def loss() -> torch.Tensor:
        return net(torch.randn(4, 2)) * random.random()

    assert alike(net, [loss, loss])
    assert net.calls == 0
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in state.items())
    assert all(buffer is buffers[name] for name, buffer in net.named_buffers())
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]


@pytest.mark.parametrize("collects", [False, True])
def test_what_forwards_leave_in_circles_is_freed(collects: bool):
    net, rows, left = Net(), torch.ones(3, 2), []

    def loss() -> torch.Tensor:
        circle = [rows.clone()]
        circle.append(circle)
        left.append(weakref.ref(circle[0]))
        # With collections meanwhile it would grow old, and a collection of young objects would not find it.
        kept.append([[] for _ in range(3000)])
        return net(rows)

    kept, threshold, on = [], gc.get_threshold(), gc.isenabled()
    gc.set_threshold(700, 1, 10**6)
    (gc.enable if collects else gc.disable)()
    try:
        assert alike(net, [loss, loss])
        assert gc.isenabled() == collects
        assert [each() for each in left] == [None] * 4
    finally:
        gc.set_threshold(*threshold)
        (gc.enable if on else gc.disable)()


def test_other_numbers_other_trained_parameters_and_refusals_are_not_alike():
    net, rows = Net(), torch.ones(3, 2)
    assert not alike(net, [lambda: net(rows)], lambda losses: [2 * loss() for loss in losses])
    assert not alike(net, [lambda: net(rows)], lambda losses: [loss().detach().requires_grad_() for loss in losses])

    def refuse(losses: list[Callable]) -> list:
        net.layer.weight = nn.Parameter(torch.zeros(2, 2))
        net.layer.bias.requires_grad_(False)
        raise SideBySideError("a weight is replaced")

    weight = net.layer.weight
    assert not alike(net, [lambda: net(rows)], refuse)
    assert net.layer.weight is weight
    assert net.layer.bias.requires_grad


def test_a_changed_weight_is_refused_and_other_errors_are_raised():
    net, rows = Net(), torch.ones(3, 2)

    def changing() -> torch.Tensor:
        with torch.no_grad():
            net.layer.weight.mul_(2)
        return net(rows)

    with pytest.raises(RuntimeError, match="changes, freezes or replaces a weight") as refused:
        alike(net, [changing])
    assert "\n" not in str(refused.value)

    def failing() -> torch.Tensor:
        net.layer.extra = 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        alike(net, [failing])
    assert not hasattr(net.layer, "extra")


def test_what_forwards_register_goes():
    class Registering(Net):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "table"):
                self.register_buffer("table", rows.sum(0).detach())
                self.register_parameter("scale", nn.Parameter(torch.ones(()), requires_grad=False))
            return super().forward(rows) * self.scale + self.table.sum()

    net, rows = Registering(), torch.ones(3, 2)
    net.norm = nn.BatchNorm1d(2)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    assert alike(net, [lambda: net(rows)])
    assert {name: value.tolist() for name, value in net.state_dict().items()} == {
        name: value.tolist() for name, value in state.items()
    }
