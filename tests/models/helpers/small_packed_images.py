"""Small configurations of the classes of diffusers that take images as sequences of patches, and shapes of latents."""

from typing import Any

from tests.models.helpers.small_images import JOINT
from tests.offload.helpers.diffusion_architectures import HEADS, TEXT_WIDTH

# Transformers of the kind of Flux, whose rotary places fill a head of 8.
PACKED = {**HEADS, "in_channels": 8, "num_layers": 1, "num_single_layers": 1, "axes_dims_rope": (4, 2, 2)}
PACKED_IMAGE = (2, 4, 6)

PACKED_IMAGES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "flux": ("FluxTransformer2DModel", {**PACKED, **JOINT, "guidance_embeds": True}, PACKED_IMAGE),
    "flux_fill": (
        "FluxTransformer2DModel", {**PACKED, **JOINT, "guidance_embeds": True, "in_channels": 24, "out_channels": 8},
        PACKED_IMAGE,
    ),
    "flux2": (
        "Flux2Transformer2DModel",
        {**PACKED, "joint_attention_dim": TEXT_WIDTH, "timestep_guidance_channels": 8, "axes_dims_rope": (2, 2, 2, 2)},
        PACKED_IMAGE,
    ),
    "chroma": (
        "ChromaTransformer2DModel",
        {
            **PACKED, "joint_attention_dim": TEXT_WIDTH, "approximator_num_channels": 8, "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        PACKED_IMAGE,
    ),
    "bria": ("BriaTransformer2DModel", {**PACKED, "joint_attention_dim": TEXT_WIDTH}, PACKED_IMAGE),
    "ovis": (
        "OvisImageTransformer2DModel", {**PACKED, "out_channels": None, "joint_attention_dim": TEXT_WIDTH},
        PACKED_IMAGE,
    ),
    "longcat": ("LongCatImageTransformer2DModel", {**PACKED, **JOINT}, PACKED_IMAGE),
    "qwen": (
        "QwenImageTransformer2DModel",
        {
            **HEADS, "in_channels": 8, "out_channels": 2, "num_layers": 2, "joint_attention_dim": TEXT_WIDTH,
            "axes_dims_rope": (4, 2, 2),
        },
        PACKED_IMAGE,
    ),
    "bria_fibo": (
        "BriaFiboTransformer2DModel",
        {
            **HEADS, "in_channels": 2, "num_layers": 1, "num_single_layers": 1, "axes_dims_rope": (4, 2, 2),
            "joint_attention_dim": TEXT_WIDTH, "text_encoder_dim": 6,
        },
        PACKED_IMAGE,
    ),
    "flux3": (
        "Flux3Transformer2DModel",
        {
            **HEADS, "in_channels": 8, "cond_in_channels": 8, "num_layers": 1, "num_single_layers": 1,
            "joint_attention_dim": TEXT_WIDTH, "timestep_channels": 8, "axes_dims_rope": (2, 2, 2, 2),
        },
        PACKED_IMAGE,
    ),
    "krea2": (
        "Krea2Transformer2DModel",
        {
            **HEADS, "in_channels": 8, "num_layers": 2, "num_key_value_heads": 1, "intermediate_size": 32,
            "timestep_embed_dim": 8, "text_hidden_dim": TEXT_WIDTH, "num_text_layers": 2,
            "text_num_attention_heads": 2, "text_num_key_value_heads": 1, "text_intermediate_size": 16,
            "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1, "axes_dims_rope": (4, 2, 2),
        },
        PACKED_IMAGE,
    ),
    # Two experts in its second block.
    "nucleus": (
        "NucleusMoEImageTransformer2DModel",
        {
            **HEADS, "in_channels": 8, "out_channels": 2, "num_layers": 2, "num_key_value_heads": 1,
            "joint_attention_dim": TEXT_WIDTH, "axes_dims_rope": (4, 2, 2), "mlp_ratio": 12.0,
            "dense_moe_strategy": "leave_first_block_dense", "num_experts": 2, "moe_intermediate_dim": 8,
            "capacity_factors": 1.0,
        },
        PACKED_IMAGE,
    ),
    "qwen21": (
        "QwenImage21Transformer2DModel",
        {
            **HEADS, "in_channels": 2, "out_channels": 2, "num_layers": 2, "context_in_dim": TEXT_WIDTH,
            "axes_dims_rope": (4, 2, 2),
        },
        PACKED_IMAGE,
    ),
}  # fmt: skip
