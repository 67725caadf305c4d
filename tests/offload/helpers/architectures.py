"""Tiny language, vision and audio models, made from configurations of transformers and peft alone.

Nothing is downloaded, and a package is imported when a model of it is made. Weights and inputs are random, and some
models have dropout. They take keyword arguments alone.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY = 2, 6, 40


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    `build` makes the model with classes of `package`, `inputs` the keyword arguments of a call, with new values each
    time. `shares`: a forward uses a parameter more than once.
    """

    package: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, object]]
    shares: bool = False


def configured(name: str, **options: object) -> nn.Module:
    """The model of a class of transformers."""
    model = getattr(importlib.import_module("transformers"), name)
    return model(model.config_class(**options))


def of_transformers(
    name: str, inputs: Callable[[], dict[str, object]], shares: bool = False, **options: object
) -> Architecture:
    return Architecture("transformers", functools.partial(configured, name, **options), inputs, shares)


def tokens(length: int = LENGTH) -> Tensor:
    """int64 [BATCH, length], without the special tokens 0 to 2."""
    return torch.randint(3, VOCABULARY, (BATCH, length))


def image(channels: int = 3, side: int = 16) -> Tensor:
    return torch.randn(BATCH, channels, side, side)


def text() -> dict[str, object]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def text_to_text() -> dict[str, object]:
    return {"input_ids": tokens(), "labels": tokens(4), "use_cache": False}


def padded_text() -> dict[str, object]:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, -2:] = 0
    return {"input_ids": tokens(), "attention_mask": mask, "labels": tokens()}


def text_and_image() -> dict[str, object]:
    return {"input_ids": tokens(), "pixel_values": image(), "return_loss": True}


def text_around_image() -> dict[str, object]:
    """Tokens of which the first four stand for the patches of an image."""
    ids = tokens()
    ids[:, :4] = IMAGE_TOKEN
    ids[:, 4:].clamp_(min=IMAGE_TOKEN + 1)
    return {"input_ids": ids, "labels": tokens(), "pixel_values": image(), "use_cache": False}


def labelled_image() -> dict[str, object]:
    return {"pixel_values": image(), "labels": torch.randint(3, (BATCH,))}


IMAGE_TOKEN = 5
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
# Decoders with rotary positions. Some derive the size of a head, or have as many keys as queries.
PLAIN = {**SPECIAL, **LAYERS, "vocab_size": VOCABULARY, "num_attention_heads": 4, "max_position_embeddings": 32}
GROUPED = {**PLAIN, "num_key_value_heads": 2}
DECODER = {**GROUPED, "head_dim": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
ENCODER = {**LAYERS, "vocab_size": VOCABULARY, "num_attention_heads": 2, "max_position_embeddings": 16}
VISION = {**LAYERS, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
BOTH = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip

DECODERS = {
    "qwen3": of_transformers("Qwen3ForCausalLM", text, **DECODER),
    # Its layers are transformers' Conv1D, a class of its own and no nn.Linear.
    "gpt2": of_transformers(
        "GPT2LMHeadModel", text, shares=True, **SPECIAL, vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2,
        n_head=2,
    ),
    "gemma3": of_transformers(
        "Gemma3ForCausalLM", text, shares=True, **DECODER, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "mixtral": of_transformers(
        "MixtralForCausalLM", text, **DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    ),
    "gpt_oss": of_transformers(
        "GptOssForCausalLM", text, **DECODER, num_local_experts=4, num_experts_per_tok=2, sliding_window=4
    ),
    "deepseek_v3": of_transformers(
        "DeepseekV3ForCausalLM", text, **PLAIN, num_key_value_heads=4, num_experts_per_tok=2, moe_intermediate_size=8,
        n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8,
        qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4,
    ),
    # The forward of a mixer reads the weights of its convolution.
    "mamba": of_transformers(
        "MambaForCausalLM", text, shares=True, vocab_size=VOCABULARY, hidden_size=16, state_size=4,
        num_hidden_layers=2, time_step_rank=2,
    ),
    "qwen3_next": of_transformers(
        "Qwen3NextForCausalLM", text, **DECODER, **EXPERTS, shared_expert_intermediate_size=8,
        layer_types=["linear_attention", "full_attention"], linear_key_head_dim=4, linear_value_head_dim=4,
        linear_num_key_heads=2, linear_num_value_heads=2,
    ),
    # Blocks share a transformer, each with an adapter of its own.
    "zamba2": of_transformers(
        "Zamba2ForCausalLM", text, shares=True, vocab_size=VOCABULARY, pad_token_id=0, hidden_size=16,
        intermediate_size=32, num_hidden_layers=4, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        mamba_d_state=4, mamba_n_groups=1, n_mamba_heads=2, mamba_headdim=16, chunk_size=4, num_attention_heads=2,
        num_key_value_heads=2, attention_head_dim=16, use_shared_attention_adapter=True, adapter_rank=2,
    ),
}  # fmt: skip
ENCODERS = {
    "t5": of_transformers(
        "T5ForConditionalGeneration", text_to_text, shares=True, vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=32,
        num_layers=2, num_heads=4, decoder_start_token_id=0,
    ),
    "bart": of_transformers(
        "BartForConditionalGeneration", text_to_text, shares=True, **BOTH, vocab_size=VOCABULARY,
        max_position_embeddings=16, encoder_layerdrop=0.3,
    ),
    "bert": of_transformers("BertForMaskedLM", padded_text, shares=True, **ENCODER),
    # One block, called three times.
    "albert": of_transformers(
        "AlbertForMaskedLM", padded_text, shares=True, **{**ENCODER, "num_hidden_layers": 3}, embedding_size=8,
        hidden_dropout_prob=0.1,
    ),
}  # fmt: skip
VISION_AND_AUDIO = {
    "vit": of_transformers(
        "ViTForImageClassification", labelled_image, **VISION, hidden_dropout_prob=0.1, num_labels=3
    ),
    "segformer": of_transformers(
        "SegformerForSemanticSegmentation", lambda: {"pixel_values": image()}, num_encoder_blocks=2, depths=[1, 2],
        sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2],
        mlp_ratios=[2, 2], decoder_hidden_size=8, drop_path_rate=0.2, num_labels=3,
    ),
    "clip": of_transformers(
        "CLIPModel", text_and_image, text_config={**ENCODER, **SPECIAL, "attention_dropout": 0.1},
        vision_config=VISION, projection_dim=8,
    ),
    # Its vision layers after the one whose output it takes get no gradients.
    "llava": of_transformers(
        "LlavaForConditionalGeneration", text_around_image, text_config={**DECODER, "model_type": "llama"},
        vision_config={**VISION, "model_type": "clip_vision_model"}, image_token_index=IMAGE_TOKEN,
    ),
    # The model reads the weight of its query embedding, and does not call it.
    "conditional_detr": of_transformers(
        "ConditionalDetrForObjectDetection", lambda: {"pixel_values": image(side=32)}, **BOTH, use_timm_backbone=False,
        use_pretrained_backbone=False, backbone=None,
        backbone_config={
            "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
            "layer_type": "basic", "out_features": ["stage2"],
        },
        num_queries=5, num_labels=3,
    ),
    "whisper": of_transformers(
        "WhisperForConditionalGeneration",
        lambda: {"input_features": torch.randn(BATCH, 8, 16), "labels": tokens(4), "use_cache": False}, shares=True,
        **BOTH, **SPECIAL, vocab_size=VOCABULARY, num_mel_bins=8, max_source_positions=8, max_target_positions=8,
        decoder_start_token_id=1, dropout=0.1,
    ),
    # One of its convolutions has a weight norm.
    "wav2vec2": of_transformers(
        "Wav2Vec2ForCTC", lambda: {"input_values": torch.randn(BATCH, 200)}, **LAYERS, vocab_size=VOCABULARY,
        num_attention_heads=2, conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(8, 4), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.2,
    ),
}  # fmt: skip


def adapted(**options: object) -> nn.Module:
    """A Qwen3 with low-rank adapters, which alone are trained."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(
        DECODERS["qwen3"].build(), LoraConfig(r=4, lora_dropout=0.1, target_modules=targets, **options)
    )
    for name, parameter in model.named_parameters():
        # Zeros at first, so that the adapter would do nothing.
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


ADAPTED = {
    "lora": Architecture("peft", adapted, text),
    "dora": Architecture("peft", functools.partial(adapted, use_dora=True), text),
}
