"""The config.json with which transformers builds the model that a checkpoint's weights are of."""

import json

from omegaconf import DictConfig

from training.config.schema import Precision

HUGGING_FACE_FILE = "config.json"
SIZES = (
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


def hugging_face_config(config: DictConfig) -> bytes:
    """For a `models.llama.Llama` of `config.model`: the keys of transformers' LlamaConfig."""
    dtype = "bfloat16" if config.precision == Precision.bf16 else "float32"
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": config.seq_len,
        # Token ids of nothing in particular would be wrong; the tokenizer knows its own.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
        **{key: config.model[key] for key in SIZES},
    }
    return json.dumps(values, indent=2).encode()
