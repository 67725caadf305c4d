"""The config.json of a checkpoint, for transformers."""

from __future__ import annotations

import json

import pytest

from tests.training.helpers.in_process import composed
from training.checkpoints.hugging_face import hugging_face_config


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_it_describes_the_model_of_the_run(precision: str, dtype: str):
    config, _ = composed("model=llama7b", "seq_len=2048", f"precision={precision}", "model.rope_theta=500000")
    values = json.loads(hugging_face_config(config))
    assert (values["architectures"], values["model_type"]) == (["LlamaForCausalLM"], "llama")
    assert (values["hidden_size"], values["num_hidden_layers"], values["rope_theta"]) == (4096, 32, 500000)
    assert (values["max_position_embeddings"], values["torch_dtype"]) == (2048, dtype)
    assert "weights" not in values
