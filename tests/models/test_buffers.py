"""Buffers after construction on the meta device: those of construction on the CPU, bit by bit."""

import pytest
import torch
from torch import nn

from models.buffers import fill_buffers


class Tables(nn.Module):
    def __init__(self, width: int = 6, rows: int = 3):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.table = nn.Parameter(torch.randn(2, width))
        self.register_buffer("angles", torch.outer(torch.arange(rows), torch.linspace(0, 1, width)).sin())
        self.register_buffer("halves", torch.arange(width) / 2, persistent=False)


def on_meta(make=Tables) -> nn.Module:
    with torch.device("meta"):
        return make()


def test_buffers_are_those_of_the_cpu() -> None:
    model = on_meta().to_empty(device="cpu")
    fill_buffers(model, Tables)
    for (name, buffer), (expected_name, expected) in zip(model.named_buffers(), Tables().named_buffers(), strict=True):
        assert name == expected_name
        assert buffer.dtype == expected.dtype
        assert torch.equal(buffer, expected)


def test_they_are_converted_as_the_model_was() -> None:
    model = on_meta().bfloat16().to_empty(device="cpu")
    fill_buffers(model, Tables)
    assert torch.equal(model.angles, Tables().bfloat16().angles)


def test_neither_parameters_nor_random_numbers_change() -> None:
    model = on_meta().to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 3.0)
    state = torch.random.get_rng_state()
    fill_buffers(model, Tables)
    assert all((parameter == 3.0).all() for parameter in model.parameters())
    assert torch.equal(state, torch.random.get_rng_state())


def test_layers_of_the_second_model_take_no_memory() -> None:
    made = []

    def build() -> nn.Module:
        made.append(Tables())
        return made[0]

    fill_buffers(on_meta().to_empty(device="cpu"), build)
    assert made[0].linear.weight.is_meta


def test_it_works_where_meta_is_the_default_device() -> None:
    model = on_meta().to_empty(device="cpu")
    with torch.device("meta"):
        fill_buffers(model, Tables)
    assert torch.equal(model.halves, Tables().halves)


def test_a_model_without_buffers_is_not_built() -> None:
    fill_buffers(nn.Linear(2, 2), lambda: pytest.fail("built"))


class Dependent(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("copy", self.linear.weight.detach().clone())


@pytest.mark.parametrize(
    ("model", "build", "message"),
    [
        (on_meta, Tables, "is on the meta device: allocate its memory"),
        (Tables, lambda: Tables(rows=4), "angles has no values: a new model of this kind has no such buffer"),
        (Tables, lambda: nn.Linear(2, 2), "has no such buffer"),
        (Dependent, Dependent, "copy has no values: it depends on parameters"),
    ],
)
def test_what_cannot_be_filled_is_refused(model, build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill_buffers(model(), build)
