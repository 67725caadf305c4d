"""Embeddings with sparse gradients: these reach the parameters as sparse as those of the resident model."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from offload.modes.layer_stream import LayerStream
from offload.modes.shard_offload import ShardOffload
from tests.offload.helpers.user_code import EVERY_MODE_OR_NONE, same_as_resident

pytestmark = pytest.mark.usefixtures("device")


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
