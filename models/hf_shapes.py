"""Shapes of well-known models of transformers, for `models.hf.build_hf`: the model type, and its configuration."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Qwen Team 2025, Qwen3-8B.
    "qwen3_8b": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
    ),
    # The layers of Mixtral 8x7B (Jiang et al. 2024), smaller: eight experts, of which a token uses two.
    "mixtral_small": (
        "mixtral",
        {
            "vocab_size": 32000,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
    ),
    # Radford et al. 2019, the smallest.
    "gpt2_124m": ("gpt2", {}),
    # Gu and Dao 2023, mamba-130m.
    "mamba_130m": ("mamba", {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24}),
    # Dosovitskiy et al. 2021, ViT-L/16.
    "vit_l": (
        "vit",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_labels": 1000,
        },
    ),
}
