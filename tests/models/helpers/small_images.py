"""Small configurations of the classes of diffusers that make images, with the shape of their latents."""

from typing import Any

from tests.offload.helpers.diffusion_architectures import HEADS, POOLED_WIDTH, TEXT_WIDTH, UNET

IMAGE = (4, 8, 8)
CHANNELS = {"in_channels": 4, "out_channels": 4}
JOINT = {"joint_attention_dim": TEXT_WIDTH, "pooled_projection_dim": POOLED_WIDTH}
TEXT_UNET = {
    **UNET,
    "cross_attention_dim": TEXT_WIDTH,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
SANA = {
    **CHANNELS, **HEADS, "num_layers": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": 8,
    "cross_attention_dim": 16, "caption_channels": TEXT_WIDTH,
}  # fmt: skip
COGVIEW = {
    **CHANNELS, "num_layers": 2, "num_attention_heads": 2, "text_embed_dim": TEXT_WIDTH, "time_embed_dim": 8,
    "condition_dim": 4, "pos_embed_max_size": 8, "sample_size": 8,
}  # fmt: skip


IMAGES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "unet": (
        "UNet2DModel",
        {
            **UNET, "in_channels": 1, "out_channels": 1, "num_class_embeds": 4,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        (1, 8, 8),
    ),
    # Latents of a small image beside the noisy ones; a mask and latents of the masked image.
    "upscaling_unet": (
        "UNet2DModel",
        {
            **UNET, "in_channels": 2, "out_channels": 1, "down_block_types": ("DownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "UpBlock2D"),
        },
        (1, 8, 8),
    ),
    "dreamlite": (
        "DreamLiteUNetModel",
        {
            **TEXT_UNET, "attention_head_dim": 4,
            "down_block_types": ("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
            "up_block_types": ("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"),
        },
        IMAGE,
    ),
    "inpainting_unet": ("UNet2DConditionModel", {**TEXT_UNET, "in_channels": 9}, IMAGE),
    "text_unet": ("UNet2DConditionModel", TEXT_UNET, IMAGE),
    "sdxl": (
        "UNet2DConditionModel",
        {
            **TEXT_UNET, "addition_embed_type": "text_time", "addition_time_embed_dim": 4,
            "projection_class_embeddings_input_dim": 24 + POOLED_WIDTH,
        },
        IMAGE,
    ),
    "dit": (
        "DiTTransformer2DModel",
        {**HEADS, "in_channels": 4, "num_layers": 2, "sample_size": 8, "num_embeds_ada_norm": 3}, IMAGE,
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            **HEADS, **JOINT, **CHANNELS, "sample_size": 8, "num_layers": 2, "caption_projection_dim": 16,
            "pos_embed_max_size": 8,
        },
        IMAGE,
    ),
    "auraflow": (
        "AuraFlowTransformer2DModel",
        {
            **HEADS, **CHANNELS, "sample_size": 8, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
            "joint_attention_dim": TEXT_WIDTH, "caption_projection_dim": 16, "pos_embed_max_size": 16,
        },
        IMAGE,
    ),
    "cogview3": ("CogView3PlusTransformer2DModel", {**COGVIEW, "attention_head_dim": 8}, IMAGE),
    "cogview4": ("CogView4Transformer2DModel", {**COGVIEW, "attention_head_dim": 8, "rope_axes_dim": (8, 8)}, IMAGE),
    "cogview4_control": (
        "CogView4Transformer2DModel", {**COGVIEW, "in_channels": 8, "attention_head_dim": 8, "rope_axes_dim": (8, 8)},
        IMAGE,
    ),
    "hidream": (
        "HiDreamImageTransformer2DModel",
        {
            **HEADS, **CHANNELS, "patch_size": 2, "num_layers": 1, "num_single_layers": 1,
            "caption_channels": [TEXT_WIDTH, TEXT_WIDTH], "text_emb_dim": POOLED_WIDTH, "axes_dims_rope": (4, 2, 2),
            "max_resolution": (4, 4), "llama_layers": [0, 1],
        },
        IMAGE,
    ),
    "hunyuan_dit": (
        "HunyuanDiT2DModel",
        {
            **HEADS, "in_channels": 4, "patch_size": 2, "sample_size": 8, "hidden_size": 16, "num_layers": 2,
            "cross_attention_dim": TEXT_WIDTH, "cross_attention_dim_t5": 16, "pooled_projection_dim": POOLED_WIDTH,
            "text_len": 3, "text_len_t5": 3,
        },
        IMAGE,
    ),
    "hunyuan_image": (
        "HunyuanImageTransformer2DModel",
        {
            **HEADS, **CHANNELS, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1,
            "text_embed_dim": TEXT_WIDTH, "rope_axes_dim": (4, 4), "guidance_embeds": True,
        },
        IMAGE,
    ),
    "kandinsky3": (
        "Kandinsky3UNet",
        {
            "time_embedding_dim": 8, "groups": 4, "attention_head_dim": 4, "layers_per_block": 2,
            # It looks at the text on all levels but the first of four.
            "block_out_channels": (8, 8, 8, 16), "cross_attention_dim": 8, "encoder_hid_dim": TEXT_WIDTH,
        },
        IMAGE,
    ),
    "lumina2": (
        "Lumina2Transformer2DModel",
        {
            "sample_size": 8, "in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1,
            "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 8, "axes_dim_rope": (4, 4, 4),
            "axes_lens": (16, 16, 16), "cap_feat_dim": TEXT_WIDTH,
        },
        IMAGE,
    ),
    "lumina_next": (
        "LuminaNextDiT2DModel",
        {
            "sample_size": 8, "in_channels": 4, "hidden_size": 16, "num_layers": 2, "num_attention_heads": 2,
            "num_kv_heads": 2, "multiple_of": 8, "cross_attention_dim": TEXT_WIDTH,
        },
        IMAGE,
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {
            # The embeddings of two sides and their ratio fill a third of the width each.
            "num_attention_heads": 3, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 2,
            "cross_attention_dim": 24, "sample_size": 8, "caption_channels": TEXT_WIDTH,
            "use_additional_conditions": True,
        },
        IMAGE,
    ),
    "prx": (
        "PRXTransformer2DModel",
        {
            "in_channels": 4, "context_in_dim": TEXT_WIDTH, "hidden_size": 16, "num_heads": 2, "depth": 2,
            "axes_dim": [4, 4],
        },
        IMAGE,
    ),
    "sana": ("SanaTransformer2DModel", {**SANA, "sample_size": 8, "guidance_embeds": True}, IMAGE),
    "cascade": (
        "StableCascadeUNet",
        {
            **CHANNELS, "timestep_ratio_embedding_dim": 8, "conditioning_dim": 8, "block_out_channels": (8, 16),
            "num_attention_heads": (2, 2), "down_num_layers_per_block": (1, 1), "up_num_layers_per_block": (1, 1),
            "clip_text_in_channels": TEXT_WIDTH, "clip_text_pooled_in_channels": POOLED_WIDTH,
            "clip_image_in_channels": POOLED_WIDTH, "switch_level": (False,),
        },
        IMAGE,
    ),
    "ernie_image": (
        "ErnieImageTransformer2DModel",
        {
            "hidden_size": 16, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 32, "in_channels": 4,
            "out_channels": 4, "text_in_dim": TEXT_WIDTH, "rope_axes_dim": [4, 2, 2],
        },
        IMAGE,
    ),
    "z_image": (
        "ZImageTransformer2DModel",
        {
            "in_channels": 4, "dim": 16, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
            "cap_feat_dim": TEXT_WIDTH, "axes_dims": [4, 2, 2], "axes_lens": [64, 16, 16],
        },
        IMAGE,
    ),
}  # fmt: skip
