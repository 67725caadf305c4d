"""Parameters and buffers that leave the module that owns them, and buffers that forward changes in any way."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from tests.offload.helpers.models import under
from tests.offload.helpers.user_code import (
    EVERY_MODE,
    Chain,
    as_resident,
    evaluate,
    same_as_resident,
    three_steps,
    train_step,
)

pytestmark = pytest.mark.usefixtures("device")


class PositionTable(nn.Module):
    """Returns a view of its parameter or of its buffer, or either as it is."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(5, 8))
        self.register_buffer("table", torch.randn(5, 8))

    def forward(self, count: int) -> object:
        return {
            "parameter": lambda: self.weight,
            "view": lambda: self.weight[:count],
            "buffer": lambda: self.table,
            "nested": lambda: {"cos_sin": (self.table[:count], [self.weight])},
        }[self.kind]()


class WithPositions(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.blocks = nn.ModuleList([PositionTable(kind), *(nn.Linear(8, 8) for _ in range(5))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.blocks[0](len(x))
        if isinstance(positions, dict):
            cos, (sin,) = positions["cos_sin"]
            positions = cos * sin
        for block in self.blocks[1:]:
            x = torch.tanh(block(x)) + positions
        return x


@EVERY_MODE
@pytest.mark.parametrize("kind", ["parameter", "view", "buffer", "nested"])
def test_a_module_that_returns_its_own_tensor(make: Callable, kind: str):
    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        return [evaluate(model), train_step(model, mode), train_step(model, mode, 1), evaluate(model)]

    same_as_resident(make, scenario, lambda: WithPositions(kind))


class Conjugates(nn.Module):
    """Computes with views of a complex weight that stand for other numbers than its bytes."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "conjugate":
            return x + torch.tanh(x @ self.weight.conj() + x @ self.weight.mH)
        return x + torch.complex(x.real @ self.weight.conj().imag, x.imag @ self.weight.real)


class OfConjugates(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(torch.complex64)).abs()


@EVERY_MODE
@pytest.mark.parametrize("kind", ["conjugate", "negative"])
def test_lazy_views_that_are_saved_for_backward(make: Callable, kind: str):
    same_as_resident(make, three_steps, lambda: OfConjugates(Conjugates(kind) for _ in range(4)))


class Codebook(nn.Module):
    """A buffer that forward changes through numpy, or replaces by one of another dtype or shape, or by none."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(8, 8)
        self.register_buffer("codes", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x)) + (self.codes.sum() if self.codes is not None else 0)
        with torch.no_grad():
            if self.kind == "numpy":
                self.codes.cpu().numpy()[:] += 1.0
            elif self.kind == "dtype":
                self.codes = (self.codes + 0.5).double()
            elif self.kind == "shape":
                self.codes = torch.cat([self.codes, x.detach().mean(0)])
            elif self.kind == "none":
                self.codes = None
        return x.float()


@EVERY_MODE
@pytest.mark.parametrize("kind", ["numpy", "dtype", "shape", "none"])
def test_a_buffer_that_forward_changes(make: Callable, kind: str):
    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        seen = [train_step(model, mode), train_step(model, mode, 1), evaluate(model)]
        return [*seen, *(b.double() for b in model.buffers())]

    same_as_resident(make, scenario, lambda: Chain(Codebook(kind) for _ in range(3)))


@EVERY_MODE
@as_resident(lambda: Chain(Codebook("dtype") for _ in range(3)))
def test_a_buffer_replaced_between_steps(model: nn.Module, mode) -> list[torch.Tensor]:
    seen = [train_step(model, mode)]
    for block in model.blocks:
        block.codes = torch.full((8,), 0.25)
    seen += [evaluate(model), train_step(model, mode, 1)]
    for block in model.blocks:
        block.codes = block.codes.double()
    return [*seen, evaluate(model), train_step(model, mode, 2), *(b.double() for b in model.buffers())]


def test_two_parameters_over_the_same_bytes_are_refused():
    """They would be untied, as they are by moving a resident model to a GPU."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    whole = torch.randn(16, 8)
    model[0].weight, model[1].weight = nn.Parameter(whole[:8]), nn.Parameter(whole[4:12])
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight share memory") as refused:
        BounceLinear().footprint(model)
    assert "\n" not in str(refused.value)
    model[1].weight = nn.Parameter(whole[8:])
    assert BounceLinear().footprint(model).units == 2


@pytest.mark.parametrize("is_meta", [False, True])
def test_an_expanded_parameter_is_refused(is_meta: bool):
    """Contiguous, as a slot would have it, kernels may round in another way, and changes in place would work."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = nn.Parameter(torch.randn(8, 1, device="meta" if is_meta else "cpu").expand(8, 8))
    with pytest.raises(ValueError, match=r"^1\.weight is expanded, .* p\.data\.contiguous\(\)$"):
        BounceLinear().footprint(model)
    model[1].weight.data = model[1].weight.data.contiguous()
    assert BounceLinear().footprint(model).units == 2


@pytest.mark.parametrize("make", [lambda: BounceLinear(), lambda: LayerStream()])
def test_strides_are_kept(make: Callable):
    class LastChannels(nn.Conv2d):
        def forward(self, x):
            assert self.weight.is_contiguous(memory_format=torch.channels_last)
            return torch.tanh(super().forward(x))

    model = Chain(LastChannels(4, 4, 3, padding=1) for _ in range(3)).to(memory_format=torch.channels_last)
    strides = [p.stride() for p in model.parameters()]
    mode = make()
    with under(mode, model) as attached:
        train_step(model, attached, inputs=torch.randn(2, 4, 6, 6))
        assert [p.stride() for p in model.parameters()] == strides
    assert [p.stride() for p in model.parameters()] == strides
