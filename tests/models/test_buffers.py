"""Buffers after construction on the meta device: those of construction on the CPU, bit by bit."""

import copy

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from models.buffers import fill_buffers
from models.built_again import with_buffers
from models.hf import TransformersModel
from models.hf_initialise import initialise_hf
from models.hf_source import same_again
from offload import LayerStream
from tests.models.helpers.hf_models import MODELS, batch, tiny, without_values
from tests.offload.helpers.models import attached


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
        (on_meta, Tables, r"angles \(and 4 more\): allocate the memory of the model before"),
        (Tables, lambda: Tables(rows=4), "angles: the model built again has no value for it"),
        (Tables, lambda: nn.Linear(2, 2), r"\(and 4 more\): the model built again has no value for it"),
        (Dependent, Dependent, "copy: the model built again has no value for it"),
    ],
)
def test_what_cannot_be_filled_is_refused(model, build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill_buffers(model(), build)


WITH_BUFFERS = [name for name in MODELS if any(True for _ in tiny(name, "meta").buffers())]


class Config(PreTrainedConfig):
    model_type = "tests_of_buffers"


class Own(PreTrainedModel):
    """A model with buffers that the tests choose."""

    config_class = Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.linear = nn.Linear(2, 2)
        self.fill()
        self.post_init()

    def fill(self) -> None: ...


class Random(Own):
    def fill(self) -> None:
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("projection", torch.randn(3))


class Loose(Own):
    def fill(self) -> None:
        self.linear.angles = torch.arange(3.0).cos()
        self.tables = [torch.arange(2.0), {"wide": torch.arange(4.0)}]


class LooseAndRandom(Own):
    def fill(self) -> None:
        self.noise = torch.randn(3)


class LooseView(Own):
    def fill(self) -> None:
        self.view = self.linear.weight.detach()


class Later(Own):
    def fill(self) -> None:
        self.register_buffer("table", torch.arange(3.0))


def made(kind: type[Own], device: str = "meta") -> TransformersModel:
    with torch.device(device):
        return TransformersModel(kind(Config()))


def test_the_architectures_have_buffers_of_every_kind():
    assert {"qwen3", "gemma", "gemma3_text", "deepseek_v3", "resnet", "swin"} <= set(WITH_BUFFERS)


@pytest.mark.parametrize("name", WITH_BUFFERS)
def test_buffers_are_those_of_a_model_built_on_the_cpu(name: str):
    model, expected = without_values(name), tiny(name)
    model.fill_buffers()
    for (path, found), (other, buffer) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert (path, found.dtype, found.device) == (other, buffer.dtype, buffer.device)
        assert torch.equal(found, buffer), path


def test_tables_are_not_rounded_in_a_narrow_model():
    model = tiny("qwen3", "meta").to(torch.bfloat16).to_empty(device="cpu")
    model.fill_buffers()
    for found, buffer in zip(model.buffers(), tiny("qwen3").buffers(), strict=True):
        assert torch.equal(found, buffer)


def test_values_are_written_in_place_and_parameters_are_left():
    model = without_values("qwen3")
    places = [buffer.data_ptr() for buffer in model.buffers()]
    model.fill_buffers()
    assert [buffer.data_ptr() for buffer in model.buffers()] == places
    assert all(parameter.isnan().all() for parameter in model.parameters())


def test_a_mode_runs_a_model_from_the_meta_device():
    model, expected = tiny("qwen3", "meta"), without_values("qwen3")
    expected.fill_buffers()
    initialise_hf(expected, seed=1)
    mode = LayerStream()
    with attached(mode, model):
        with pytest.raises(RuntimeError, match="without values"):
            model(*batch("qwen3"))
        initialise_hf(model, seed=1)
        with pytest.raises(RuntimeError, match=r"without values: hf\.model\.rotary_emb"):
            model(*batch("qwen3"))
        model.fill_buffers()
        with mode.step():
            loss = model(*batch("qwen3"))
            loss.backward()
    assert torch.equal(loss, expected(*batch("qwen3")))


def test_the_random_numbers_of_the_caller_stay():
    model, state = without_values("gemma"), torch.get_rng_state()
    model.fill_buffers()
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_of_the_model_built_again_have_no_memory():
    model = tiny("mixtral", "meta")
    config = copy.deepcopy(model.hf.config.to_dict())
    shell = with_buffers(lambda: same_again(model.hf))
    assert all(parameter.is_meta for parameter in shell.parameters())
    assert not any(buffer.is_meta for buffer in shell.buffers())
    assert model.hf.config.to_dict() == config
    assert not nn.Linear(2, 2).weight.is_meta


def test_buffers_without_memory_are_refused():
    with pytest.raises(ValueError, match=r"rotary_emb\.inv_freq \(and 1 more\): allocate the memory"):
        tiny("qwen3", "meta").fill_buffers()


def test_random_buffers_are_refused():
    with pytest.raises(ValueError, match=r"^projection: its values are random"):
        made(Random).to_empty(device="cpu").fill_buffers()


def test_a_tensor_that_is_no_buffer_is_that_of_the_cpu():
    model = made(Loose).to_empty(device="cpu")
    assert model.hf.linear.angles.is_meta
    model.fill_buffers()
    assert torch.equal(model.hf.linear.angles, torch.arange(3.0).cos())
    assert "angles" not in dict(model.hf.linear.named_buffers())
    assert model.hf.tables[0].tolist() == [0, 1]
    assert model.hf.tables[1]["wide"].tolist() == [0, 1, 2, 3]


def test_a_random_tensor_that_is_no_buffer_is_refused():
    with pytest.raises(ValueError, match=r"^noise: its values are random"):
        made(LooseAndRandom).to_empty(device="cpu").fill_buffers()


def test_a_tensor_of_weights_that_is_no_buffer_is_refused():
    with pytest.raises(ValueError, match=r"^view: the model built again has no value for it"):
        made(LooseView).to_empty(device="cpu").fill_buffers()


def test_a_buffer_that_was_added_later_is_refused_before_anything_is_written():
    model = made(Later).to_empty(device="cpu")
    model.hf.table.fill_(7)
    model.hf.linear.register_buffer("mask", torch.ones(1))
    with pytest.raises(ValueError, match=r"^linear\.mask: the model built again has no value"):
        model.fill_buffers()
    assert model.hf.table.tolist() == [7, 7, 7]
