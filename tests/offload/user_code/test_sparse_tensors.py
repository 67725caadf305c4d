"""Sparse and quantised tensors of torch as parameters and buffers of blocks: they stay on the device, as they are."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.offload.helpers.models import stack_inputs
from tests.offload.helpers.user_code import EVERY_MODE, Chain, NoMode, same_as_resident, train_step


def sparse(matrix: torch.Tensor) -> torch.Tensor:
    return (matrix * (matrix > 0)).to_sparse()


KINDS = {
    "sparse": sparse,
    "sparse rows": lambda matrix: sparse(matrix).to_sparse_csr(),
    "quantised": lambda matrix: torch.quantize_per_tensor(matrix, 0.1, 3, torch.qint8),
}


class Graph(nn.Module):
    """A layer beside a product with an adjacency matrix."""

    def __init__(self, kind: str, is_buffer: bool):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        made = KINDS[kind](torch.randn(8, 8))
        if is_buffer:
            self.register_buffer("matrix", made)
        else:
            self.matrix = nn.Parameter(made, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix.dequantize() if self.matrix.is_quantized else self.matrix
        return torch.tanh(self.linear(x)) + (matrix @ x.t()).t()


def graphs(kind: str, is_buffer: bool) -> nn.Module:
    return Chain(Graph(kind, is_buffer) for _ in range(4))


@EVERY_MODE
@pytest.mark.parametrize("is_buffer", [True, False], ids=["buffer", "parameter"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_without_flat_bytes_stays_on_the_device(make: Callable, kind: str, is_buffer: bool):
    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        losses = [train_step(model, mode, step) for step in range(2)]
        matrices = [block.matrix for block in model.blocks]
        return [*losses, *(each.dequantize() if kind == "quantised" else each.to_dense() for each in matrices)]

    def build() -> nn.Module:
        model = graphs(kind, is_buffer)
        # The comparison of states at the end is one of dense tensors.
        model.state_dict = lambda: {
            name: tensor for name, tensor in nn.Module.state_dict(model).items() if "linear" in name
        }
        return model

    same_as_resident(make, scenario, build)


@EVERY_MODE
@pytest.mark.parametrize("trains", [True, False], ids=["trains", "frozen"])
def test_a_sparse_parameter_under_several_microbatches(make: Callable, trains: bool):
    def losses(model: nn.Module) -> list[Callable[[], torch.Tensor]]:
        return [lambda part=part: model(stack_inputs(0, part)).square().mean() for part in range(3)]

    def scenario(model: nn.Module, attached) -> list[torch.Tensor]:
        if attached is NoMode:
            for loss in losses(model):
                loss().backward()
        else:
            with attached.step():
                attached.accumulate(losses(model))
        found = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        model.zero_grad()
        return [gradient.to_dense() for gradient in found]

    def build() -> nn.Module:
        model = graphs("sparse", is_buffer=False)
        for block in model.blocks:
            block.matrix.requires_grad_(trains)
        model.state_dict = dict
        return model

    same_as_resident(make, scenario, build)
