"""Shapes of well-known diffusion models, for `build_diffusion`: the class of diffusers, and its configuration."""

from typing import Any

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Peebles and Xie 2023, DiT-XL/2 for latents of 256 x 256 pixels. It has 675M parameters; diffusers keeps a copy of
    # the embeddings of times and labels in each of the 28 blocks, which makes 750M.
    "dit_xl": (
        "DiTTransformer2DModel",
        {
            "sample_size": 32,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 28,
            "num_attention_heads": 16,
            "attention_head_dim": 72,
            "num_embeds_ada_norm": 1000,
        },
    ),
    # Black Forest Labs 2024, FLUX.1-dev.
    "flux": ("FluxTransformer2DModel", {"guidance_embeds": True}),
    # The same kinds of layers in a twelfth of the weights.
    "flux_small": (
        "FluxTransformer2DModel",
        {"guidance_embeds": True, "num_layers": 6, "num_single_layers": 12, "num_attention_heads": 12},
    ),
    # Podell et al. 2023.
    "sdxl_unet": (
        "UNet2DConditionModel",
        {
            "sample_size": 128,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "attention_head_dim": [5, 10, 20],
            "block_out_channels": [320, 640, 1280],
            "cross_attention_dim": 2048,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "layers_per_block": 2,
            "projection_class_embeddings_input_dim": 2816,
            "transformer_layers_per_block": [1, 2, 10],
            "use_linear_projection": True,
        },
    ),
    # For letters of 16 pixels in eight classes: large enough to draw them, small enough for a CPU.
    "unet_small": (
        "UNet2DModel",
        {
            "sample_size": 16,
            "in_channels": 1,
            "out_channels": 1,
            "block_out_channels": [32, 64],
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "attention_head_dim": 16,
            "num_class_embeds": 9,
            "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
            "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
        },
    ),
    # HaCohen et al. 2024, the model of 2B parameters.
    "ltx_video": ("LTXVideoTransformer3DModel", {}),
}
