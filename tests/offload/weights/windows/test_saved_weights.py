"""Weights that autograd or a function keeps: by name, and brought back when backward asks for them."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.activations.checkpointing import recompute
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.shard_offload import ShardOffload
from tests.offload.helpers.models import Stack, stack_inputs, under
from tests.offload.helpers.quantised import WIDTH, Model, Nested, same_as_resident


def test_a_slots_memory_is_not_passed_to_the_hooks_outside():
    """Then no graph keeps it, and other units may take the slot."""
    model, mode, kept = Stack(), LayerStream(slots=1), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with under(mode, model) as attached, attached.step():
        slots = {slot.bytes.data_ptr() for slot in attached._streamer._slots}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(stack_inputs(0, 0)).sum()
        assert kept
        assert not any(tensor.untyped_storage().data_ptr() in slots for tensor in kept)
        loss.backward()


def test_hooks_that_are_nested_in_themselves_do_nothing():
    model, mode = Stack(), LayerStream(slots=1)
    with under(mode, model) as attached:
        windows = attached._streamer._windows
        saved, running = windows._saved, windows.threads.running
        with saved.hooks(running):
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            with saved.hooks(running):
                assert torch._C._autograd._top_saved_tensors_default_hooks(True) == hooks


def test_weights_changed_between_forward_and_backward_are_refused():
    model, mode = Stack(), BounceLinear(slots=1)
    with under(mode, model) as attached, attached.step():
        loss = model(stack_inputs(0, 0)).sum()
        with torch.no_grad():
            model.blocks[1].up.weight.add_(1)
        with pytest.raises(
            RuntimeError, match=r"blocks.1.up.weight, needed for gradient computation, has been modified"
        ):
            loss.backward()


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_weights_may_change_when_backward_does_not_need_them(place: str):
    with torch.device(place):
        model, mode = Stack(), LayerStream(slots=1)
    with under(mode, model) as attached:
        for parameter in model.parameters():
            nn.init.uniform_(parameter)
        with attached.step():
            loss = model(stack_inputs(0, 0)).sum()
            with torch.no_grad():
                # Backward of a layer does not need its bias, although it lies beside its weight.
                model.blocks[1].up.bias.add_(1)
            loss.backward()


def test_an_in_place_edit_of_a_saved_activation_raises_as_autograd_does():
    model, mode = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)), BounceLinear()
    with under(mode, model) as attached, attached.step():
        hidden = model[0](stack_inputs(0, 0))
        out = model[1](hidden)
        hidden.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("of_the_user", [False, True])
def test_a_recompute_of_frozen_blocks_is_made_for_a_checkpoint_of_the_user_alone(of_the_user: bool):
    """torch's begins where a weight is asked for; that of `recompute` need not, for weights come back by name."""
    model, mode, calls = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).requires_grad_(False), LayerStream(), []
    model[1].register_forward_pre_hook(lambda *_: calls.append(1))
    block = nn.Sequential(model[1])
    with under(mode, model) as attached, attached.step():
        undo = recompute([block])
        inputs = stack_inputs(0, 0).requires_grad_()
        hidden = checkpoint(model[1], inputs, use_reentrant=False) if of_the_user else block(inputs)
        model[2](hidden).sum().backward()
        undo()
    assert len(calls) == 1 + of_the_user
    assert torch.equal(inputs.grad, torch.ones(5, 8) @ model[2].weight @ model[1].weight)


class Product(torch.autograd.Function):
    """Keeps its weight on the context, in a dictionary, as code does that goes past `save_for_backward`."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.kept = {"weight": [weight], "rows": len(rows)}
        return rows @ weight.dequantize().t()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return gradient @ ctx.kept["weight"][0].dequantize(), None


class PlainProduct(torch.autograd.Function):
    """Keeps a plain weight, and its rows, as attributes of its context."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.rows, ctx.weight = rows.detach(), weight
        return rows @ weight.t()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return gradient @ ctx.weight, gradient.t() @ ctx.rows


class Plain(nn.Module):
    """A layer, frozen or trained, of a function that writes `ctx.weight = weight`."""

    def __init__(self, trains: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8, requires_grad=trains)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return PlainProduct.apply(rows, self.weight)


class FromOutside(nn.Module):
    """A layer whose function also gets a weight of the module around it."""

    def __init__(self):
        super().__init__()
        self.inner, self.weight = Plain(trains=False), nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return PlainProduct.apply(self.inner(rows), self.weight)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(Nested.of(torch.randn(WIDTH, WIDTH)), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return Product.apply(rows, self.weight)


def model(wrap=lambda layer: layer) -> Model:
    made = Model("nested")
    for block in made.blocks:
        block.second = wrap(Layer())
    return made


class Recomputed(nn.Module):
    def __init__(self, layer: nn.Module, reentrant: bool):
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, rows, use_reentrant=self.reentrant)


@pytest.mark.parametrize("mode", [BounceLinear(slots=1), LayerStream(slots=1)], ids=["layers", "blocks"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "recomputed reentrantly"])
def test_a_function_gets_its_weight_again_wherever_it_kept_it(mode, reentrant: bool | None):
    wrap = (lambda layer: layer) if reentrant is None else lambda layer: Recomputed(layer, reentrant)
    same_as_resident(model(wrap), mode)


def plain_model(make: Callable[[], nn.Module]) -> Model:
    made = Model("nested")
    for block in made.blocks:
        block.first, block.second = make(), make()
    return made


@pytest.mark.parametrize(
    "mode", [BounceLinear(slots=2), LayerStream(slots=1), ShardOffload(slots=1)], ids=["layers", "blocks", "shards"]
)
@pytest.mark.parametrize(
    "make", [lambda: Plain(False), lambda: Plain(True), FromOutside], ids=["frozen", "trained", "of two modules"]
)
def test_a_plain_weight_on_a_context_is_the_right_one_in_backward(mode, make: Callable[[], nn.Module]):
    same_as_resident(plain_model(make), mode)


def test_a_plain_weight_is_the_right_one_where_a_block_is_recomputed():
    made = plain_model(lambda: Recomputed(Plain(trains=True), reentrant=False))
    same_as_resident(made, LayerStream(slots=1))


def test_a_graph_that_is_kept_is_run_twice_and_leaves_nothing_behind():
    made = model()
    mode = LayerStream(slots=1)
    rows = torch.randn(5, 8, requires_grad=True)
    with under(mode, made) as attached:
        with attached.step():
            loss = made(rows).square().mean()
            (first,) = torch.autograd.grad(loss, rows, retain_graph=True)
            (second,) = torch.autograd.grad(loss, rows)
        assert torch.equal(first, second)
        alive = [weakref.ref(each) for each in gc.get_objects() if type(each) is Product._backward_cls]
        assert len(alive) == len(made.blocks)
        del loss
        assert all(node() is None for node in alive)


def test_a_weight_that_changed_since_forward_is_refused():
    made = model()
    mode = LayerStream(slots=1)
    with under(mode, made) as attached, attached.step():
        loss = made(torch.randn(5, 8, requires_grad=True)).square().mean()
        made.blocks[1].second.weight.scale.mul_(2)
        with pytest.raises(RuntimeError, match=r"blocks\.1\.second\.weight, needed for gradient .* modified"):
            loss.backward()
