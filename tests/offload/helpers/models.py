"""Models for the tests of the engine, and the comparison of a mode with the resident model."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.modes.mode import NO_OPTIONS, Attached, AttachOptions
from offload.modes.none import Resident
from offload.streams import registry


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(self.down(F.gelu(self.up(self.norm(hidden)))))


class Stack(nn.Module):
    """An embedding layer, residual blocks and a head; `recompute` is None, "reentrant" or "non-reentrant"."""

    def __init__(self, width: int = 16, depth: int = 4, recompute: str | None = None, dropout: float = 0.0):
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 4, bias=False)
        self.recompute = recompute

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(inputs)
        for block in self.blocks:
            if self.recompute:
                hidden = checkpoint(block, hidden, use_reentrant=self.recompute == "reentrant")
            else:
                hidden = block(hidden)
        return self.head(hidden)


class Shared(nn.Module):
    """One layer used three times, and a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.layer.weight
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in (self.layer, self.again, self.layer):
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


def tokens(step: int, microbatch: int) -> torch.Tensor:
    return torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(10 * step + microbatch))


@contextmanager
def under(mode, model: nn.Module, device: str = "cpu", options: AttachOptions = NO_OPTIONS) -> Iterator[Attached]:
    """Attaches `mode` to `model` for the length of the block."""
    streams = registry.acquire(device)
    try:
        attached = mode.attach(model, streams, options)
        try:
            yield attached
        finally:
            attached.detach()
    finally:
        registry.release(streams)


def stack_inputs(step: int, microbatch: int, device: str | None = None) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 * step + microbatch)
    return torch.randn(5, 8, generator=generator, device="cpu").to(device or torch.get_default_device())


def normal(*shape: int) -> Callable[[int, int], torch.Tensor]:
    """Returns inputs of this shape, others for each step and microbatch."""

    def inputs(step: int, microbatch: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(10 * step + microbatch))

    return inputs


def train(
    model: nn.Module,
    mode,
    inputs: Callable[[int, int], torch.Tensor] = stack_inputs,
    steps: int = 3,
    microbatches: int = 2,
    device: str = "cpu",
) -> list[torch.Tensor]:
    """Trains `model` under `mode`. Returns all losses and gradients, step by step, and the weights, on the host."""

    def loss_of(step: int, microbatch: int) -> torch.Tensor:
        torch.manual_seed(100 * step + microbatch)
        return model(inputs(step, microbatch)).float().square().mean() / microbatches

    seen = []
    with under(mode, model, device) as attached:
        # The update runs on the host in every mode: AdamW on a GPU rounds differently.
        masters = [p.detach().cpu().clone().requires_grad_() for p in model.parameters()]
        optimizer = torch.optim.AdamW(masters, lr=0.05, foreach=False)
        for step in range(steps):
            with attached.step():
                losses = attached.accumulate([partial(loss_of, step, microbatch) for microbatch in range(microbatches)])
            seen += [loss.cpu() for loss in losses]
            seen += [p.grad.detach().cpu().clone() for p in model.parameters() if p.grad is not None]
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.detach().cpu().clone()
                parameter.grad = None
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
        seen += [p.detach().cpu().clone() for p in model.parameters()]
    return seen


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    """Fails unless two results of `train` are equal bit for bit."""
    assert len(left) == len(right)
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        assert same_bits(one, other), f"item {index}: {one} != {other}"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tells whether two tensors are equal bit for bit: `torch.equal` takes zeros of both signs for equal."""
    if one.layout != torch.strided or other.layout != torch.strided:
        return torch.equal(one, other)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def same_as_resident(model: nn.Module, mode, inputs: Callable = stack_inputs, **options) -> None:
    """Trains `model` under `mode` and resident. Fails unless losses, gradients, weights and buffers are equal."""
    moved, resident = with_copy(model)
    assert_same(train(moved, mode, inputs, **options), train(resident, Resident(), inputs, **options))
    for (name, one), other in zip(moved.named_buffers(), resident.buffers(), strict=True):
        assert same_bits(one.cpu(), other.cpu()), name


def with_copy(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Returns the model and an independent copy of it."""
    return model, copy.deepcopy(model)
