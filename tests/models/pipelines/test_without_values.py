"""The network's call that is asked for without values is the one that encoders with weights lead to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from models.pipelines.calls import NetworkCall
from models.pipelines.opening import encoders_of, open_pipeline
from models.pipelines.recording import CPU, Asked, Recorder
from models.pipelines.without_values import answering, parts_without_values
from tests.models.helpers.tiny_pipelines import PIPELINES, made, network_of

SIZE, LONG = (32, 64), "a very long caption, " * 9


def same(one: object, other: object) -> bool:
    """Whether two calls, or parts of these, are the same; of tensors without values the shape and the dtype."""
    if isinstance(one, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape and one.device == other.device
        return alike and (one.is_meta or torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture(scope="module", params=[*PIPELINES, "krea_2"])
def folder_and_network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    pipeline = made(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    pipeline.save_pretrained(folder)
    return folder, network_of(pipeline).to("meta")


@pytest.mark.sampled
def test_a_call_is_the_same_without_values(folder_and_network: tuple[Path, nn.Module]):
    (folder, network), dtype = folder_and_network, torch.bfloat16
    expected = NetworkCall.of(Recorder(open_pipeline(folder, network, dtype), network, CPU), SIZE, LONG)
    pipeline = open_pipeline(folder, network, dtype, parts=parts_without_values(folder, dtype))
    texts, vae = encoders_of(pipeline, network)
    assert all(parameter.is_meta for part in (*texts, vae) for parameter in part.parameters())
    with answering(texts) as forwards:
        found = NetworkCall.of(Recorder(pipeline, network, CPU), SIZE, LONG)
    assert same(found.state(), expected.state())
    assert {each.encoder for each in forwards} == {*texts}


def test_parts_have_the_dtypes_of_a_load(folder_and_network: tuple[Path, nn.Module]):
    folder, network = folder_and_network
    loaded = encoders_of(open_pipeline(folder, network, torch.bfloat16, vae_dtype=torch.float32), network)
    assert {parameter.dtype for parameter in loaded[1].parameters()} == {torch.float32}
    parts = parts_without_values(folder, torch.bfloat16, vae_dtype=torch.float32)
    texts = [part for name, part in parts.items() if name.startswith("text")]
    for one, other in zip((*loaded[0], loaded[1]), (*texts, parts["vae"]), strict=True):
        assert type(one) is type(other)
        dtypes = [
            {name: (tensor.shape, tensor.dtype) for name, tensor in (*part.named_parameters(), *part.named_buffers())}
            for part in (one, other)
        ]
        assert dtypes[0] == dtypes[1]


def test_a_longer_caption_decides_the_shape(tmp_path: Path):
    pipeline = made("qwen_image")
    pipeline.save_pretrained(tmp_path)
    network = network_of(pipeline).to("meta")
    recorder = Recorder(pipeline, network, CPU)
    lengths = [NetworkCall.of(recorder, SIZE, text).meta_conditions(1) for text in ("", LONG)]
    asked = recorder.record(Asked((LONG,), SIZE, SIZE)).arguments["encoder_hidden_states"]
    assert lengths[1]["encoder_hidden_states"].shape == asked.shape
    assert lengths[0]["encoder_hidden_states"].shape[1] < asked.shape[1]
