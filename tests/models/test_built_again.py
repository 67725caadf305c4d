"""A model that is built a second time, without memory for its parameters: its buffers and first values."""

import pytest
import torch
from torch import nn

from models.built_again import as_made, fill_buffers, with_buffers, without_weights
from models.hf_initialise import initialise_hf
from offload import LayerStream
from tests.models.helpers.hf_models import MODELS, batch, tiny, without_values
from tests.offload.helpers.models import under


class Own(nn.Module):
    def __init__(self, noise: bool = False):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.shift = nn.Parameter(torch.zeros(4))
        self.unfilled = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.randn(3) if noise else torch.arange(3))


def test_parameters_have_no_memory_but_those_that_are_kept():
    built = without_weights(Own, {(Own, "shift")})
    assert {name for name, p in built.named_parameters() if not p.is_meta} == {"shift"}
    assert built.table.tolist() == [0, 1, 2]
    assert not nn.Linear(2, 2).weight.is_meta
    with torch.device("meta"):
        assert not without_weights(Own).table.is_meta


def test_random_buffers_are_refused_and_random_numbers_stay():
    state = torch.get_rng_state()
    assert with_buffers(Own).table.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="table: its values are random, so build this model on the CPU"):
        with_buffers(lambda: Own(noise=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_values_are_those_of_construction_by_the_seed():
    state, model = torch.get_rng_state(), Own()
    found = [dict(as_made(model, Own, ["scale", "shift"], seed)) for seed in (1, 1, 2)]
    assert torch.equal(found[0]["scale"], found[1]["scale"])
    assert not torch.equal(found[0]["scale"], found[2]["scale"])
    assert found[0]["scale"].std() > 0
    assert not found[0]["shift"].any()
    torch.set_rng_state(state)
    assert torch.equal(Own().scale, model.scale)


def test_memory_that_nothing_is_written_to_is_refused():
    with pytest.raises(ValueError, match="unfilled: its library gives it no first value: load weights instead"):
        dict(as_made(Own(), Own, ["unfilled"], 0))
    assert not torch.are_deterministic_algorithms_enabled()
    assert list(as_made(Own(), lambda: pytest.fail("built"), [], 0)) == []


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_those_of_the_cpu_and_nothing_else_changes(dtype: torch.dtype) -> None:
    model = on_meta().to(dtype).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 3.0)
    state, places = torch.random.get_rng_state(), [buffer.data_ptr() for buffer in model.buffers()]
    fill_buffers(model, Tables)
    assert all((parameter == 3.0).all() for parameter in model.parameters())
    assert torch.equal(state, torch.random.get_rng_state())
    assert [buffer.data_ptr() for buffer in model.buffers()] == places
    for (name, buffer), (expected_name, expected) in zip(
        model.named_buffers(), Tables().to(dtype).named_buffers(), strict=True
    ):
        assert (name, buffer.dtype) == (expected_name, expected.dtype)
        assert torch.equal(buffer, expected)


def test_a_model_without_buffers_is_not_built() -> None:
    fill_buffers(nn.Linear(2, 2), lambda: pytest.fail("built"))


class Dependent(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("copy", self.linear.weight.detach().clone())


class LooseAndRandom(nn.Module):
    def __init__(self):
        super().__init__()
        self.noise = torch.randn(3)


class LooseView(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.view = self.linear.weight.detach()


@pytest.mark.parametrize(
    ("model", "build", "message"),
    [
        (on_meta, Tables, r"angles \(and 4 more\): allocate the memory of the model before"),
        (Tables, lambda: Tables(rows=4), "angles: the model built again has no value for it"),
        (Tables, lambda: nn.Linear(2, 2), r"\(and 4 more\): the model built again has no value for it"),
        (Dependent, Dependent, "copy: the model built again has no value for it"),
        (lambda: on_meta(LooseAndRandom), LooseAndRandom, "^noise: its values are random"),
        (lambda: on_meta(LooseView), LooseView, "^view: the model built again has no value for it"),
    ],
)
def test_what_cannot_be_filled_is_refused(model, build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill_buffers(model(), build)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"gpt2", "opt", "mamba", "vit", "convnext"}))  # have none
def test_buffers_are_those_of_a_model_built_on_the_cpu(name: str):
    model, expected = without_values(name), tiny(name)
    model.fill_buffers()
    for (path, found), (other, buffer) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert (path, found.dtype, found.device) == (other, buffer.dtype, buffer.device)
        assert torch.equal(found, buffer), path


def test_a_mode_runs_a_model_from_the_meta_device():
    model, expected = tiny("qwen3", "meta"), without_values("qwen3")
    expected.fill_buffers()
    initialise_hf(expected, seed=1)
    mode = LayerStream()
    with under(mode, model) as attached:
        with pytest.raises(RuntimeError, match="without values"):
            model(*batch("qwen3"))
        initialise_hf(model, seed=1)
        with pytest.raises(RuntimeError, match=r"without values: hf\.model\.rotary_emb"):
            model(*batch("qwen3"))
        model.fill_buffers()
        with attached.step():
            loss = model(*batch("qwen3"))
            loss.backward()
    assert torch.equal(loss, expected(*batch("qwen3")))


class Loose(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.linear.angles = torch.arange(3.0).cos()
        self.tables = [torch.arange(2.0), {"wide": torch.arange(4.0)}]


def test_a_tensor_that_is_no_buffer_is_that_of_the_cpu():
    model = on_meta(Loose)
    assert model.linear.angles.is_meta
    fill_buffers(model, Loose)
    assert torch.equal(model.linear.angles, torch.arange(3.0).cos())
    assert not list(model.buffers())
    assert model.tables[0].tolist() == [0, 1]
    assert model.tables[1]["wide"].tolist() == [0, 1, 2, 3]
