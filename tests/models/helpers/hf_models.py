"""Tiny models of transformers' architectures, as `models.hf.build_hf` makes them, and batches for them."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.hf import TransformersModel, build_hf

BATCH, LENGTH, VOCABULARY, CLASSES = 2, 6, 40, 3
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
TEXT = {**SPECIAL, "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
PLAIN = {**TEXT, **LAYERS, "max_position_embeddings": 32}
GROUPED = {**PLAIN, "num_key_value_heads": 2}
DECODER = {**GROUPED, "head_dim": 4}
GPT = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
MIXTRAL = {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}
IMAGE = {"image_size": 16, "num_labels": CLASSES}

LANGUAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", DECODER),
    "qwen3_tied": ("qwen3", {**DECODER, "tie_word_embeddings": True}),
    "llama": ("llama", GROUPED), "gpt2": ("gpt2", {**SPECIAL, **GPT}),
    # Some of its parameters begin as their modules are made.
    "openai-gpt": ("openai-gpt", GPT),
    # An encoder, which is a decoder in this task; its head has a bias.
    "bert": ("bert", {**PLAIN, "hidden_dropout_prob": 0.0}),
    "opt": ("opt", {**TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 32}),
    "falcon": ("falcon", TEXT), "gemma": ("gemma", DECODER),
    # Sliding windows, and two rotary tables.
    "gemma3_text": (
        "gemma3_text", {**DECODER, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma2": ("gemma2", {**DECODER, "sliding_window": 4}),
    "granite": ("granite", {**GROUPED, "logits_scaling": 3.0}),
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral_balanced": ("mixtral", {**MIXTRAL, "output_router_logits": True}),
    "gpt_oss": ("gpt_oss", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **PLAIN, "num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
            "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8,
            "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8, "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
        },
    ),
    "mamba": (
        "mamba",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2},
    ),
}  # fmt: skip
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit", {**LAYERS, **IMAGE, "num_attention_heads": 2, "patch_size": 8}),
    "convnext": ("convnext", {"num_labels": CLASSES, "hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2}),
    "resnet": (
        "resnet",
        {"num_labels": CLASSES, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    ),
    "swin": (
        "swin",
        {**IMAGE, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4},
    ),
}
MODELS = LANGUAGE | VISION
# Architectures that differ from all of these in one respect, for the tests of that.
CODEGEN = {**GPT, "n_head": 4, "rotary_dim": 4, "n_inner": 32}
SEQUENCES = {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
SINGLE: dict[str, tuple[str, dict[str, Any]]] = {
    # A mask of ones that the model makes itself.
    "bart": (
        "bart",
        {
            **SPECIAL, **SEQUENCES, "d_model": 16, "decoder_layers": 2, "decoder_ffn_dim": 32,
            "decoder_attention_heads": 2, "encoder_layers": 1,
        },
    ),
    # Tables of positions that nothing trains.
    "gptj": ("gptj", CODEGEN), "codegen": ("codegen", CODEGEN), "ctrl": ("ctrl", {**GPT, "dff": 32}),
    # A table of positions of which the last is no text's.
    "prophetnet": (
        "prophetnet",
        {
            **SPECIAL, **SEQUENCES, "hidden_size": 16, "num_decoder_layers": 2, "decoder_ffn_dim": 32,
            "num_decoder_attention_heads": 2, "disable_ngram_loss": True,
        },
    ),
    # Parameters that torch makes on the CPU under any device.
    "diffllama": ("diffllama", GROUPED),
    # A router that computes with its weights in float32.
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {**GROUPED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 0},
    ),
    # A table of positions that has the dtype of the embeddings, to which it is added.
    "xglm": ("xglm", {**SPECIAL, **SEQUENCES, "d_model": 16, "num_layers": 2, "ffn_dim": 32, "attention_heads": 2}),
    # Orthogonal first values, and some that depend on the names of layers.
    "rwkv": ("rwkv", {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}),
    "xlstm": ("xlstm", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}),
    # A table of places that a linear layer takes.
    "swinv2": (
        "swinv2", {**IMAGE, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    ),
    # Logits under another name.
    "pp_lcnet": (
        "pp_lcnet",
        {
            "num_labels": CLASSES, "block_configs": [[[3, 16, 16, 1, False]]] * 4 + [[[5, 16, 24, 2, True]]],
            "depths": [1] * 5, "class_expand": 32,
        },
    ),
}  # fmt: skip


def task_of(name: str) -> str:
    return "classification" if name in (*VISION, "pp_lcnet", "swinv2") else "causal_lm"


def tiny(name: str, device: str = "cpu", attention: str = "auto", **overrides: Any) -> TransformersModel:
    """The model of that name; on the CPU with transformers' own first values, the same each time."""
    source, values = (MODELS | SINGLE)[name]
    torch.manual_seed(0)
    with torch.device(device):
        return build_hf(source, task_of(name), {**values, **overrides}, attention)


def without_values(name: str, **overrides: Any) -> TransformersModel:
    """The model made on the meta device, with memory of the CPU that is NaN wherever it can be."""
    model = tiny(name, "meta", **overrides).to_empty(device="cpu")
    # `to_empty` makes a tensor for each of two that were tied.
    model.hf.tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(torch.nan if tensor.is_floating_point() else 77)
    return model


def batch(name: str, seed: int = 0) -> tuple[Tensor, ...]:
    """The arguments of a call: ids and labels, both int64 [BATCH, LENGTH], or images [BATCH, 3, 16, 16]."""
    generator = torch.Generator().manual_seed(seed)
    if task_of(name) == "classification":
        return (torch.randn(BATCH, 3, 16, 16, generator=generator),)
    row = torch.randint(3, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return row[:, :-1], row[:, 1:]


def trained(name: str) -> TransformersModel:
    """A model in which no tensor is as it was first, norms and statistics included."""
    model = tiny(name).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.rand(tensor.shape, generator=generator) / 8)
    return model


def logits(name: str, model: PreTrainedModel) -> Tensor:
    """The logits of a batch."""
    first = batch(name)[0]
    return model(**{"input_ids" if name in LANGUAGE else "pixel_values": first}).logits
