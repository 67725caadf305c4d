from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from models.hf import TransformersModel
from models.hf_buffers import fill_buffers, model_without_weights
from models.hf_initialise import initialise_hf
from offload import LayerStream
from tests.models.helpers.hf_models import MODELS, batch, tiny, without_values
from tests.offload.helpers.models import attached

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
        self.scale = torch.ones(3)


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
    fill_buffers(model)
    for (path, found), (other, buffer) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert (path, found.dtype, found.device) == (other, buffer.dtype, buffer.device)
        assert torch.equal(found, buffer), path


def test_tables_are_not_rounded_in_a_narrow_model():
    model = tiny("qwen3", "meta").to(torch.bfloat16).to_empty(device="cpu")
    fill_buffers(model)
    for found, buffer in zip(model.buffers(), tiny("qwen3").buffers(), strict=True):
        assert torch.equal(found, buffer)


def test_values_are_written_in_place_and_parameters_are_left():
    model = without_values("qwen3")
    places = [buffer.data_ptr() for buffer in model.buffers()]
    fill_buffers(model)
    assert [buffer.data_ptr() for buffer in model.buffers()] == places
    assert all(parameter.isnan().all() for parameter in model.parameters())


def test_a_mode_runs_a_model_from_the_meta_device():
    model, expected = tiny("qwen3", "meta"), without_values("qwen3")
    fill_buffers(expected)
    initialise_hf(expected, seed=1)
    mode = LayerStream()
    with attached(mode, model):
        with pytest.raises(RuntimeError, match="without values"):
            model(*batch("qwen3"))
        initialise_hf(model, seed=1)
        with pytest.raises(RuntimeError, match=r"without values: hf\.model\.rotary_emb"):
            model(*batch("qwen3"))
        fill_buffers(model)
        with mode.step():
            loss = model(*batch("qwen3"))
            loss.backward()
    assert torch.equal(loss, expected(*batch("qwen3")))


def test_the_random_numbers_of_the_caller_stay():
    model, state = without_values("gemma"), torch.get_rng_state()
    fill_buffers(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_of_the_model_built_again_have_no_memory():
    model = tiny("mixtral", "meta")
    config = copy.deepcopy(model.hf.config.to_dict())
    shell = model_without_weights(model.hf)
    assert all(parameter.is_meta for parameter in shell.parameters())
    assert not any(buffer.is_meta for buffer in shell.buffers())
    assert model.hf.config.to_dict() == config
    assert not nn.Linear(2, 2).weight.is_meta


def test_buffers_without_memory_are_refused():
    with pytest.raises(ValueError, match=r"rotary_emb\.inv_freq \(and 1 more\): allocate the memory"):
        fill_buffers(tiny("qwen3", "meta"))


def test_random_buffers_are_refused():
    with pytest.raises(ValueError, match=r"^projection: its values are random"):
        fill_buffers(made(Random).to_empty(device="cpu"))


def test_a_tensor_that_is_no_buffer_is_refused():
    model = made(Loose)
    with pytest.raises(ValueError, match=r"^scale: it is neither parameter nor buffer"):
        fill_buffers(model.to_empty(device="cpu"))


def test_a_buffer_that_was_added_later_is_refused_before_anything_is_written():
    model = made(Later).to_empty(device="cpu")
    model.hf.table.fill_(7)
    model.hf.linear.register_buffer("mask", torch.ones(1))
    with pytest.raises(ValueError, match=r"^linear\.mask: the model built again has no value"):
        fill_buffers(model)
    assert model.hf.table.tolist() == [7, 7, 7]
