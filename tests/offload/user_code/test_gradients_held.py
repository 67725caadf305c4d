"""Gradients that users keep, assign, ask autograd for, or hook; sparse ones stay as sparse as resident."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from offload.modes.layer_stream import LayerStream
from offload.modes.shard_offload import ShardOffload
from tests.offload.helpers.models import stack_inputs
from tests.offload.helpers.user_code import EVERY_MODE, EVERY_MODE_OR_NONE, as_resident, evaluate, same_as_resident

pytestmark = pytest.mark.usefixtures("device")


def backward(model: nn.Module, attached, step: int) -> None:
    with attached.step():
        model(stack_inputs(step, 0)).square().mean().backward()


@EVERY_MODE
@pytest.mark.parametrize("view", [False, True])
@as_resident()
def test_a_gradient_that_is_still_held_is_not_overwritten(model: nn.Module, mode, view: bool) -> list[torch.Tensor]:
    backward(model, mode, 0)
    held = [p.grad[:1] if view else p.grad for p in model.parameters()]
    model.zero_grad()
    backward(model, mode, 1)
    return [*held, *(p.grad.clone() for p in model.parameters())]


@EVERY_MODE
@as_resident()
def test_an_assigned_gradient_is_added_to_in_place(model: nn.Module, mode) -> list[torch.Tensor]:
    assigned = [torch.ones_like(p) for p in model.parameters()]
    for parameter, gradient in zip(model.parameters(), assigned, strict=True):
        parameter.grad = gradient
    backward(model, mode, 0)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), assigned, strict=True))
    return assigned


@EVERY_MODE
@as_resident()
def test_gradients_asked_of_autograd(model: nn.Module, attached) -> list[torch.Tensor]:
    with attached.step():
        loss = model(stack_inputs(0, 0)).square().mean()
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert all(p.grad is None for p in model.parameters())
    return list(found)


@EVERY_MODE
@as_resident()
def test_backward_for_some_inputs_alone(model: nn.Module, attached) -> list[torch.Tensor]:
    with attached.step():
        loss = model(stack_inputs(0, 0)).square().mean()
        loss.backward(inputs=list(model.blocks.parameters()))
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@EVERY_MODE
@as_resident()
def test_hooks_registered_before_and_after_forward(model: nn.Module, attached) -> list[torch.Tensor]:
    seen = []
    first, last = model.blocks[0].up.weight, model.blocks[3].down.weight
    handles = [first.register_hook(lambda gradient: gradient * 2)]
    handles.append(
        torch.autograd.graph.register_multi_grad_hook(
            [first, last], lambda gradients: seen.extend(g.clone() for g in gradients)
        )
    )
    with attached.step():
        loss = model(stack_inputs(0, 0)).square().mean()
        handles.append(last.register_hook(lambda gradient: gradient * 3))
        loss.backward()
    for handle in handles:
        handle.remove()
    return [*seen, *(p.grad.clone() for p in model.parameters())]


@EVERY_MODE
@as_resident(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)))
def test_a_parameter_that_a_second_derivative_lacks_has_no_gradient(
    model: nn.Module, attached
) -> list[torch.Tensor | None]:
    """Zeros would be a gradient for the optimizer, which decays the weight and counts the step."""
    with attached.step():
        inputs = stack_inputs(0, 0).requires_grad_()
        weighted = (model(inputs) * stack_inputs(1, 0)).sum()
        (slope,) = torch.autograd.grad(weighted, inputs, create_graph=True)
        slope.square().sum().backward()
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


@EVERY_MODE
@as_resident()
def test_a_graph_that_is_kept_is_differentiated_twice(model: nn.Module, attached) -> list[torch.Tensor]:
    with attached.step():
        inputs = stack_inputs(0, 0).requires_grad_()
        loss = model(inputs).square().mean()
        loss.backward(retain_graph=True)
        once = inputs.grad.clone()
        loss.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        slope.square().sum().backward()
    return [once, inputs.grad, slope.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@EVERY_MODE
@as_resident()
def test_two_forwards_and_an_evaluation_before_one_backward(model: nn.Module, attached) -> list[torch.Tensor]:
    seen = []
    for step in range(2):
        with attached.step():
            first = model(stack_inputs(step, 0))
            seen.append(evaluate(model))
            (first.square().mean() + model(stack_inputs(step, 2)).exp().mean()).backward()
        seen += [p.grad.clone() for p in model.parameters()]
    return seen


def tokens(number: int) -> torch.Tensor:
    return torch.tensor([[1, 2, 2], [3, 4, 1]]) + number


class Words(nn.Module):
    """A sparse embedding in the first block, which can also be used as a matrix, with a dense gradient."""

    def __init__(self, embedding: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList([Read(embedding), *(nn.Linear(8, 8) for _ in range(3))])

    def forward(self, words: torch.Tensor, densely: bool = False) -> torch.Tensor:
        hidden = self.blocks[0](words, densely)
        for block in self.blocks[1:]:
            hidden = torch.tanh(block(hidden))
        return hidden


class Read(nn.Module):
    def __init__(self, embedding: nn.Module):
        super().__init__()
        self.embedding = embedding

    def forward(self, words: torch.Tensor, densely: bool) -> torch.Tensor:
        if densely:
            return F.one_hot(words, 10).float() @ self.embedding.weight
        return self.embedding(words)


def words() -> nn.Module:
    return Words(nn.Embedding(10, 8, sparse=True))


def bags() -> nn.Module:
    return Words(nn.EmbeddingBag(10, 8, sparse=True, mode="sum"))


def train(model: nn.Module, attached, microbatches: list[bool]) -> list[torch.Tensor]:
    """Three steps of SGD; `microbatches` tells for each whether its gradient of the embedding is dense."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        with attached.step():
            for number, densely in enumerate(microbatches):
                loss = model(tokens(step + number), densely).square().mean()
                loss.backward()
        gradients = [p.grad for p in model.parameters()]
        assert gradients[0].is_sparse == (not any(microbatches))
        seen += [loss.detach(), *(gradient.to_dense().clone() for gradient in gradients)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@EVERY_MODE_OR_NONE
@pytest.mark.parametrize("build", [words, bags])
def test_sparse_gradients(make: Callable, build: Callable[[], nn.Module]):
    same_as_resident(make, lambda model, mode: train(model, mode, [False, False]), build)


@pytest.mark.parametrize("make", [LayerStream, lambda: ShardOffload(shards=2)])
@pytest.mark.parametrize("microbatches", [[False, True, False], [True, False, True]])
def test_sparse_and_dense_gradients_of_one_parameter(make: Callable, microbatches: list[bool]):
    same_as_resident(make, lambda model, mode: train(model, mode, microbatches), words)
