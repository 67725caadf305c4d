"""Messages carry the configuration with its types."""

from __future__ import annotations

import torch
from omegaconf import OmegaConf

from tests.training.helpers.in_process import composed
from training.config.schema import RecomputeBlocks
from training.parallel.messages import encoded, from_bytes, to_bytes


def test_a_configuration_keeps_values_and_types():
    config, invocation = composed("offload=layer_stream_swap", "recompute=block", "seed=7")
    found, also = from_bytes(to_bytes((config, invocation)))
    assert also == invocation
    assert OmegaConf.to_yaml(found, resolve=True) == OmegaConf.to_yaml(config, resolve=True)
    for key in ("offload", "offload.weights", "optimizer", "recompute"):
        assert OmegaConf.get_type(OmegaConf.select(found, key)) is OmegaConf.get_type(OmegaConf.select(config, key))
    assert OmegaConf.get_type(found.recompute) is RecomputeBlocks


def test_a_tensor_arrives_as_it_is():
    tensor = torch.randn(3, 4).to(torch.bfloat16)
    assert torch.equal(from_bytes(to_bytes({"a": tensor}))["a"], tensor)


def test_a_message_goes_with_its_length():
    length, data = encoded(("step", 3))
    assert (length.dtype, data.dtype) == (torch.int64, torch.uint8)
    assert length.tolist() == [len(data)]
    assert from_bytes(data.numpy().tobytes()) == ("step", 3)
