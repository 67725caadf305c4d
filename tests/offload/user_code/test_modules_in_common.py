"""Blocks that have modules in common: an activation, rotary places, a norm, the banks of some adapters."""

from collections.abc import Callable

import torch
from torch import nn

from offload.blocks import find_blocks
from tests.offload.helpers.user_code import EVERY_MODE, Chain, same_as_resident, three_steps


class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("factors", torch.randn(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.factors


class Layer(nn.Module):
    def __init__(self, **common: nn.Module):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        for name, module in common.items():
            setattr(self, name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.activation(self.linear(self.places(self.norm(x))))


def layers() -> nn.Module:
    common = {"activation": nn.GELU(), "places": Places(), "norm": nn.LayerNorm(8)}
    return Chain(Layer(**common) for _ in range(4))


@EVERY_MODE
def test_every_block_streams_but_for_what_they_have_in_common(make: Callable):
    assert len(find_blocks(layers())) == 4
    same_as_resident(make, three_steps, layers)
