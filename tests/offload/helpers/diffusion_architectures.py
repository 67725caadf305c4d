"""Tiny models of diffusers, made without a download; see `architectures`."""

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.offload.helpers.architectures import BATCH, Architecture, image

TEXT_WIDTH, POOLED_WIDTH = 12, 8


def made(name: str, **options: object) -> nn.Module:
    """The model of a class of diffusers."""
    return getattr(importlib.import_module("diffusers"), name)(**options)


def of_diffusers(
    name: str, inputs: Callable[[], dict[str, object]], shares: bool = False, **options: object
) -> Architecture:
    return Architecture("diffusers", functools.partial(made, name, **options), inputs, shares)


def steps() -> Tensor:
    return torch.randint(100, (BATCH,))


def described() -> dict[str, object]:
    return {"encoder_hidden_states": torch.randn(BATCH, 3, TEXT_WIDTH)}


def pooled() -> dict[str, object]:
    return {**described(), "pooled_projections": torch.randn(BATCH, POOLED_WIDTH)}


def of_a_class() -> dict[str, object]:
    return {"hidden_states": image(4, 8), "timestep": steps(), "class_labels": torch.randint(10, (BATCH,))}


def packed_latents() -> dict[str, object]:
    """Latents as a sequence of patches, with their places."""
    return {
        **pooled(), "hidden_states": torch.randn(BATCH, 4, 4), "timestep": torch.rand(BATCH),
        "img_ids": torch.randint(4, (4, 3)).float(), "txt_ids": torch.zeros(3, 3), "guidance": torch.ones(BATCH),
    }  # fmt: skip


def packed_video() -> dict[str, object]:
    return {
        **described(), "hidden_states": torch.randn(BATCH, 8, 4), "timestep": torch.rand(BATCH),
        "encoder_attention_mask": torch.ones(BATCH, 3), "num_frames": 2, "height": 2, "width": 2,
    }  # fmt: skip


def video() -> dict[str, object]:
    return {**described(), "hidden_states": torch.randn(BATCH, 4, 1, 4, 4), "timestep": steps()}


def image_with_texts_of_layers() -> dict[str, object]:
    return {
        "hidden_states": image(4, 8),
        "timesteps": steps(),
        "encoder_hidden_states_t5": torch.randn(BATCH, 3, TEXT_WIDTH),
        "encoder_hidden_states_llama3": torch.randn(2, BATCH, 3, TEXT_WIDTH),
        "pooled_embeds": torch.randn(BATCH, POOLED_WIDTH),
    }


HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
UNET = {
    "sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
    "attention_head_dim": 4,
}  # fmt: skip

DIFFUSION = {
    # The model calls a layer of the first block once more at the end.
    "dit": of_diffusers(
        "DiTTransformer2DModel", of_a_class, shares=True, **HEADS, in_channels=4, num_layers=2, sample_size=8,
        dropout=0.1, num_embeds_ada_norm=10,
    ),
    "flux": of_diffusers(
        "FluxTransformer2DModel", packed_latents, **HEADS, in_channels=4, num_layers=2, num_single_layers=2,
        joint_attention_dim=TEXT_WIDTH, pooled_projection_dim=POOLED_WIDTH, axes_dims_rope=(4, 2, 2),
        guidance_embeds=True,
    ),
    "sd3": of_diffusers(
        "SD3Transformer2DModel", lambda: {**pooled(), "hidden_states": image(4, 8), "timestep": torch.rand(BATCH)},
        **HEADS, sample_size=8, in_channels=4, out_channels=4, num_layers=2, joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=16, pooled_projection_dim=POOLED_WIDTH, pos_embed_max_size=8,
    ),
    "ltx_video": of_diffusers(
        "LTXVideoTransformer3DModel", packed_video, **HEADS, in_channels=4, out_channels=4, cross_attention_dim=16,
        num_layers=2, caption_channels=TEXT_WIDTH,
    ),
    "wan": of_diffusers(
        "WanTransformer3DModel", video, num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=TEXT_WIDTH, freq_dim=8, ffn_dim=32, num_layers=2,
    ),
    # Mixtures of experts in lists of blocks, which in training compute another way than in eval().
    "hidream": of_diffusers(
        "HiDreamImageTransformer2DModel", image_with_texts_of_layers, **HEADS, in_channels=4, out_channels=4,
        patch_size=2, num_layers=1, num_single_layers=1, caption_channels=[TEXT_WIDTH, TEXT_WIDTH],
        text_emb_dim=POOLED_WIDTH, axes_dims_rope=(4, 2, 2), max_resolution=(4, 4), llama_layers=[0, 1],
    ),
    "unet_with_text": of_diffusers(
        "UNet2DConditionModel", lambda: {**described(), "sample": image(4, 8), "timestep": steps()}, **UNET,
        cross_attention_dim=TEXT_WIDTH, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), dropout=0.1,
    ),
    "unet": of_diffusers(
        "UNet2DModel", lambda: {"sample": image(3, 8), "timestep": steps()}, **UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "autoencoder": of_diffusers(
        "AutoencoderKL", lambda: {"sample": image(), "sample_posterior": True}, block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4,
        latent_channels=4, sample_size=16,
    ),
    # Its quantizer reads the weight of the codebook, and does not call it.
    "vq": of_diffusers(
        "VQModel", lambda: {"sample": image()}, block_out_channels=(8,), norm_num_groups=4, num_vq_embeddings=16,
        latent_channels=4,
    ),
}  # fmt: skip
