"""Small configurations of classes of diffusers that make videos, with shapes of latents."""

from typing import Any

from tests.models.helpers.small_images import CHANNELS, SANA
from tests.offload.helpers.diffusion_architectures import HEADS, POOLED_WIDTH, TEXT_WIDTH

VIDEO = (4, 2, 4, 4)
# Rotary places of 3 axes need heads of 12 or 16.
WIDE_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
VIDEO_UNET = {
    "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "cross_attention_dim": TEXT_WIDTH,
}  # fmt: skip
WAN = {
    "num_attention_heads": 2, "attention_head_dim": 12, **CHANNELS, "text_dim": TEXT_WIDTH, "freq_dim": 8,
    "ffn_dim": 32, "num_layers": 2,
}  # fmt: skip
# Of image-to-video: a mask and latents of the image beside the noisy ones, and its tokens.
WAN_IMAGE = {"in_channels": 9, "image_dim": 6, "added_kv_proj_dim": 24}
COGVIDEO = {
    **WIDE_HEADS, **CHANNELS, "time_embed_dim": 8, "text_embed_dim": TEXT_WIDTH, "num_layers": 2, "sample_width": 4,
    "sample_height": 4, "sample_frames": 5, "max_text_seq_length": 3,
}  # fmt: skip
KANDINSKY = {
    "in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": TEXT_WIDTH, "in_text_dim2": POOLED_WIDTH, "time_dim": 8,
    "model_dim": 32, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (8, 4, 4),
}  # fmt: skip

VIDEOS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "allegro": (
        "AllegroTransformer3DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 12, **CHANNELS, "num_layers": 2, "cross_attention_dim": 24,
            "sample_height": 4, "sample_width": 4, "sample_frames": 2, "caption_channels": TEXT_WIDTH,
        },
        VIDEO,
    ),
    "cogvideox": ("CogVideoXTransformer3DModel", {**COGVIDEO, "use_rotary_positional_embeddings": True}, VIDEO),
    "cogvideox15": (
        "CogVideoXTransformer3DModel",
        {**COGVIDEO, "use_rotary_positional_embeddings": True, "patch_size_t": 2, "patch_bias": False}, VIDEO,
    ),
    "cogvideox_image": ("CogVideoXTransformer3DModel", {**COGVIDEO, "in_channels": 8, "ofs_embed_dim": 8}, VIDEO),
    "consisid": ("ConsisIDTransformer3DModel", COGVIDEO, VIDEO),
    # Its masks of padding are resized by torchvision.
    "cosmos": (
        "CosmosTransformer3DModel",
        {
            **CHANNELS, **WIDE_HEADS, "num_layers": 2, "mlp_ratio": 2, "text_embed_dim": TEXT_WIDTH,
            "adaln_lora_dim": 4, "max_size": (4, 8, 8), "concat_padding_mask": False,
        },
        VIDEO,
    ),
    "easyanimate": (
        "EasyAnimateTransformer3DModel",
        {
            **WIDE_HEADS, **CHANNELS, "patch_size": 2, "sample_width": 4, "sample_height": 4, "num_layers": 2,
            "mmdit_layers": 1, "time_embed_dim": 8, "text_embed_dim": TEXT_WIDTH, "text_embed_dim_t5": TEXT_WIDTH,
        },
        VIDEO,
    ),
    "hunyuan_video": (
        "HunyuanVideoTransformer3DModel",
        {
            **HEADS, **CHANNELS, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1,
            "text_embed_dim": TEXT_WIDTH, "pooled_projection_dim": POOLED_WIDTH, "rope_axes_dim": (4, 2, 2),
        },
        VIDEO,
    ),
    "hunyuan_video15": (
        "HunyuanVideo15Transformer3DModel",
        {
            # Its projection of the second text has 2048 channels, beside which narrower blocks would be too small.
            "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 9, "out_channels": 4, "num_layers": 2,
            "num_refiner_layers": 1, "text_embed_dim": TEXT_WIDTH, "text_embed_2_dim": TEXT_WIDTH,
            "image_embed_dim": TEXT_WIDTH, "rope_axes_dim": (8, 4, 4),
        },
        VIDEO,
    ),
    "i2vgen": (
        "I2VGenXLUNet",
        {
            **VIDEO_UNET,
            # Its encoder of frames has two heads of as many channels as latents.
            **CHANNELS, "attention_head_dim": 4, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        # As for UNet3DConditionModel.
        (4, 3, 4, 4),
    ),
    "kandinsky5": ("Kandinsky5Transformer3DModel", KANDINSKY, VIDEO),
    "kandinsky5_image": ("Kandinsky5Transformer3DModel", {**KANDINSKY, "visual_cond": True}, VIDEO),
    "latte": (
        "LatteTransformer3DModel",
        {
            **HEADS, "in_channels": 4, "out_channels": 8, "num_layers": 2, "cross_attention_dim": 16, "sample_size": 4,
            "patch_size": 2, "norm_type": "ada_norm_single", "norm_elementwise_affine": False,
            "caption_channels": TEXT_WIDTH, "video_length": 2,
        },
        VIDEO,
    ),
    "ltx": (
        "LTXVideoTransformer3DModel",
        {**HEADS, **CHANNELS, "cross_attention_dim": 16, "num_layers": 2, "caption_channels": TEXT_WIDTH}, VIDEO,
    ),
    "mochi": (
        "MochiTransformer3DModel",
        {
            **HEADS, "in_channels": 4, "num_layers": 2, "pooled_projection_dim": 16,
            # Its pooling has eight heads.
            "text_embed_dim": 16, "time_embed_dim": 4, "max_sequence_length": 3,
        },
        VIDEO,
    ),
    "sana_video": ("SanaVideoTransformer3DModel", {**SANA, "attention_head_dim": 12, "cross_attention_dim": 24}, VIDEO),
    "skyreels": ("SkyReelsV2Transformer3DModel", WAN, VIDEO),
    "skyreels_image": ("SkyReelsV2Transformer3DModel", {**WAN, **WAN_IMAGE}, VIDEO),
    "svd": (
        "UNetSpatioTemporalConditionModel",
        {
            # Its normalisations have 32 groups.
            "block_out_channels": (32, 32), "layers_per_block": 1, "cross_attention_dim": TEXT_WIDTH,
            "num_attention_heads": (2, 2), "addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 12,
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        },
        # As for UNet3DConditionModel.
        (4, 3, 4, 4),
    ),
    "unet_3d": (
        "UNet3DConditionModel",
        {
            **VIDEO_UNET, "attention_head_dim": 4, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        # Of two frames torch's weight gradients in bf16 are wrong on processors with AVX512-BF16, inf among them.
        (4, 3, 4, 4),
    ),
    "unet_motion": (
        "UNetMotionModel",
        {
            **VIDEO_UNET, "num_attention_heads": 2, "motion_num_attention_heads": 2, "motion_max_seq_length": 4,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
        },
        VIDEO,
    ),
    "wan": ("WanTransformer3DModel", WAN, VIDEO),
    "wan_image": ("WanTransformer3DModel", {**WAN, **WAN_IMAGE}, VIDEO),
    "wan_vace": ("WanVACETransformer3DModel", {**WAN, "vace_layers": (0,), "vace_in_channels": 5}, VIDEO),
    "anyflow": ("AnyFlowTransformer3DModel", {**WAN, "image_dim": 6}, VIDEO),
    "chronoedit": ("ChronoEditTransformer3DModel", {**WAN, **WAN_IMAGE}, VIDEO),
    "joyimage": (
        "JoyImageEditTransformer3DModel",
        {
            **CHANNELS, "hidden_size": 32, "num_attention_heads": 2, "text_dim": TEXT_WIDTH, "mlp_width_ratio": 2.0,
            "num_layers": 2, "rope_dim_list": (8, 4, 4),
        },
        VIDEO,
    ),
    "motif": (
        "MotifVideoTransformer3DModel",
        {
            **WIDE_HEADS, "in_channels": 9, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
            "text_embed_dim": TEXT_WIDTH, "image_embed_dim": 6, "rope_axes_dim": (8, 4, 4),
        },
        VIDEO,
    ),
}  # fmt: skip
