"""Writes the config.json with which transformers builds the model of a checkpoint's weights."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig

from training.config.schema import Precision
from training.weights.architecture import LLAMA_KEYS


def hugging_face_config(config: DictConfig, values: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """Returns the keys of transformers' LlamaConfig for the `models.llama.Llama` of `config.model`, as JSON.

    `values` are what else is known: the longest text, and the tokens around a text, which a checkpoint leaves to the
    tokenizer.
    """
    dtype = "bfloat16" if config.precision == Precision.bf16 else "float32"
    known = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": config.seq_len,
        # The model does not know these ids; the tokenizer does.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
        **{key: config.model[key] for key in LLAMA_KEYS},
        **values,
    }
    return json.dumps(known, indent=2).encode()
