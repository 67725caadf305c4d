"""Small configurations of the classes of diffusers that make sounds and embeddings, with shapes of their latents."""

from typing import Any

from tests.models.helpers.small_images import CHANNELS
from tests.offload.helpers.diffusion_architectures import HEADS, POOLED_WIDTH, TEXT_WIDTH, UNET

SOUNDS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "prior": (
        "PriorTransformer", {**HEADS, "num_layers": 2, "embedding_dim": POOLED_WIDTH, "num_embeddings": 3},
        (POOLED_WIDTH,),
    ),
    "stable_audio": (
        "StableAudioDiTModel",
        {
            **CHANNELS, "sample_size": 6, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
            "num_key_value_attention_heads": 1, "cross_attention_dim": 8, "time_proj_dim": 8,
            "global_states_input_dim": POOLED_WIDTH, "cross_attention_input_dim": TEXT_WIDTH,
        },
        (4, 6),
    ),
    "unet_1d": (
        "UNet1DModel",
        {
            **CHANNELS, "sample_size": 64,
            # Its first block takes the embedding of the time as channels.
            "time_embedding_dim": 16, "extra_in_channels": 16,
            # Its heads have 32 channels.
            "block_out_channels": (32, 32), "down_block_types": ("DownBlock1DNoSkip", "AttnDownBlock1D"),
            "up_block_types": ("AttnUpBlock1D", "UpBlock1DNoSkip"),
        },
        (4, 64),
    ),
    "ace_step": (
        "AceStepTransformer1DModel",
        {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 8, "in_channels": 10, "audio_acoustic_hidden_dim": 4,
            "encoder_hidden_size": TEXT_WIDTH, "sliding_window": 2,
        },
        (4, 6),
    ),
    "audioldm2": (
        "AudioLDM2UNet2DConditionModel",
        {
            **UNET, "attention_head_dim": 2, "cross_attention_dim": [[None, TEXT_WIDTH, 6]] * 2,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        },
        (4, 8, 8),
    ),
    "longcat_audio": (
        "LongCatAudioDiTTransformer",
        {"dit_dim": 16, "dit_depth": 2, "dit_heads": 2, "dit_text_dim": TEXT_WIDTH, "latent_dim": 4}, (4, 6),
    ),
    "minimax_music": (
        "MiniMaxMusic3Transformer1DModel",
        {
            **HEADS, "in_channels": 4, "condition_dim": TEXT_WIDTH, "num_layers": 2, "ff_inner_dim": 32,
            "rotary_dim": 4, "fourier_embedding_dim": 8,
        },
        (4, 6),
    ),
    "stable_audio3": (
        "StableAudio3DiTModel",
        {
            "io_channels": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "cond_token_dim": TEXT_WIDTH,
            "global_cond_dim": POOLED_WIDTH, "local_add_cond_dim": 5, "timestep_features_dim": 8, "ff_mult": 2.0,
            "num_memory_tokens": 2,
        },
        (4, 6),
    ),
}  # fmt: skip
