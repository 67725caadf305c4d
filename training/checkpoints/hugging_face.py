"""Writes the config.json with which transformers builds the model of a checkpoint's weights."""

import json

from omegaconf import DictConfig

from training.config.schema import Precision

COPIED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rope_theta",
    "rms_norm_eps",
    "tie_word_embeddings",
)


def hugging_face_config(config: DictConfig, eos_token_id: int | None = None) -> bytes:
    """Returns the keys of transformers' LlamaConfig for the `models.llama.Llama` of `config.model`, as JSON.

    `eos_token_id` is the token that ends a text; a checkpoint leaves that to the tokenizer.
    """
    dtype = "bfloat16" if config.precision == Precision.bf16 else "float32"
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": config.seq_len,
        # The model does not know these ids; the tokenizer does.
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "torch_dtype": dtype,
        **{key: config.model[key] for key in COPIED_KEYS},
    }
    return json.dumps(values, indent=2).encode()
