"""Tiny pipelines of diffusers, made from configurations: their encoders, networks and tokenizers have random values."""

import shutil
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from diffusers import DiffusionPipeline
from tokenizers import pre_tokenizers
from torch import nn


def clip_tokenizer() -> transformers.CLIPTokenizer:
    """One token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(alphabet + [f"{letter}</w>" for letter in alphabet])}
    vocab |= {"<|startoftext|>": len(vocab), "<|endoftext|>": len(vocab) + 1}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def t5_tokenizer() -> transformers.T5Tokenizer:
    """One token for each letter."""
    letters = ["\u2581"] + [chr(code) for code in range(33, 127)]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)] + [(letter, -2.0) for letter in letters]
    return transformers.T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)


def qwen_tokenizer() -> transformers.Qwen2Tokenizer:
    """One token for each byte."""
    vocab = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = transformers.Qwen2Tokenizer(vocab=vocab, merges=[])
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "pad_token": "<|endoftext|>"})
    return made


def clip(projection: bool = False) -> nn.Module:
    config = transformers.CLIPTextConfig(
        vocab_size=600, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        projection_dim=32, bos_token_id=512, eos_token_id=513,
    )  # fmt: skip
    return (transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel)(config).eval()


def t5(made: type = transformers.T5EncoderModel, config: type = transformers.T5Config) -> nn.Module:
    return made(config(vocab_size=128, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)).eval()


def vae(channels: int = 4, **options: object) -> nn.Module:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=channels, norm_num_groups=4, sample_size=32,
        **options,
    ).eval()  # fmt: skip


def unet(**options: object) -> nn.Module:
    return diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(16, 32), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, **options,
    )  # fmt: skip


def flux() -> DiffusionPipeline:
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1, scaling_factor=0.36),
        text_encoder=clip(), tokenizer=clip_tokenizer(), text_encoder_2=t5(), tokenizer_2=t5_tokenizer(),
        transformer=transformer,
    )  # fmt: skip


def sd3() -> DiffusionPipeline:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64,
    )  # fmt: skip
    return diffusers.StableDiffusion3Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(shift_factor=0.06, scaling_factor=1.5),
        text_encoder=clip(projection=True), tokenizer=clip_tokenizer(), text_encoder_2=clip(projection=True),
        tokenizer_2=clip_tokenizer(), text_encoder_3=t5(), tokenizer_3=t5_tokenizer(), transformer=transformer,
    )  # fmt: skip


def sdxl() -> DiffusionPipeline:
    network = unet(
        attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=80, cross_attention_dim=64,
    )  # fmt: skip
    return diffusers.StableDiffusionXLPipeline(
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type="epsilon"
        ),
        vae=vae(), text_encoder=clip(), tokenizer=clip_tokenizer(), text_encoder_2=clip(projection=True),
        tokenizer_2=clip_tokenizer(), unet=network,
    )  # fmt: skip


def pixart() -> DiffusionPipeline:
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=2, attention_head_dim=8, num_attention_heads=4, caption_channels=32,
        cross_attention_dim=32, in_channels=4, out_channels=8, use_additional_conditions=False,
    )  # fmt: skip
    return diffusers.PixArtSigmaPipeline(
        scheduler=diffusers.DPMSolverMultistepScheduler(), vae=vae(), text_encoder=t5(), tokenizer=t5_tokenizer(),
        transformer=transformer,
    )  # fmt: skip


def qwen_image() -> DiffusionPipeline:
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderKLQwenImage(
        base_dim=24, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False],
        latents_mean=[0.1, 0.2, 0.3, 0.4], latents_std=[1.0, 2.0, 1.5, 0.5],
    )  # fmt: skip
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e6}
    text |= {"num_key_value_heads": 2, "vocab_size": 300, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, vision_token_id=290, image_token_id=291, vision_start_token_id=292,
        vision_end_token_id=293,
    )  # fmt: skip
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=autoencoder.eval(),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config).eval(),
        tokenizer=qwen_tokenizer(),
        transformer=transformer,
    )


def wan() -> DiffusionPipeline:
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=32, freq_dim=32,
        ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.1] * 4, latents_std=[1.5] * 4,
    )  # fmt: skip
    return diffusers.WanPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=autoencoder.eval(),
        text_encoder=t5(transformers.UMT5EncoderModel, transformers.UMT5Config),
        tokenizer=t5_tokenizer(),
        transformer=transformer,
    )


def ltx() -> DiffusionPipeline:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32,
        num_layers=1, caption_channels=32,
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False), decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=1,
    )  # fmt: skip
    return diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=autoencoder.eval(), text_encoder=t5(),
        tokenizer=t5_tokenizer(), transformer=transformer,
    )  # fmt: skip


def longcat() -> DiffusionPipeline:
    """By default it writes other prompts by its text encoder, at random."""
    transformer = diffusers.LongCatImageTransformer2DModel(
        in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    encoder = {"text_encoder": qwen_image().text_encoder, "tokenizer": qwen_tokenizer(), "text_processor": None}
    return diffusers.LongCatImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae(use_quant_conv=False, use_post_quant_conv=False, channels=16),
        transformer=transformer,
        **encoder,
    )


def ltx_condition() -> DiffusionPipeline:
    """It gives its scheduler the negative velocity, with a time for each token."""
    return diffusers.LTXConditionPipeline(**ltx().components)


def stable_diffusion() -> DiffusionPipeline:
    return diffusers.StableDiffusionPipeline(
        scheduler=diffusers.PNDMScheduler(
            skip_prk_steps=True, beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"
        ),
        vae=vae(), text_encoder=clip(), tokenizer=clip_tokenizer(),
        unet=unet(attention_head_dim=4, cross_attention_dim=32), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip


def chroma() -> DiffusionPipeline:
    transformer = diffusers.ChromaTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 4, 8), approximator_hidden_dim=32, approximator_layers=1,
        approximator_num_channels=16,
    )  # fmt: skip
    return diffusers.ChromaPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1, scaling_factor=0.36),
        text_encoder=t5(),
        tokenizer=t5_tokenizer(),
        transformer=transformer,
    )


def z_image() -> DiffusionPipeline:
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=16, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
        axes_dims=[4, 2, 2], axes_lens=[640, 64, 64],
    )  # fmt: skip
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = "user {{ messages[0]['content'] }}"
    config = transformers.Qwen3Config(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1, scaling_factor=0.36),
        text_encoder=transformers.Qwen3Model(config).eval(),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def mochi() -> DiffusionPipeline:
    """Its scheduler counts from noise to image."""
    torch.manual_seed(0)
    transformer = diffusers.MochiTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16, in_channels=12,
        text_embed_dim=32, time_embed_dim=4,
    )  # fmt: skip
    channels = {"encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4}
    return diffusers.MochiPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=diffusers.AutoencoderKLMochi(layers_per_block=(1,) * 5, **channels).eval(),
        text_encoder=t5(), tokenizer=t5_tokenizer(), transformer=transformer,
    )  # fmt: skip


def krea_2() -> DiffusionPipeline:
    """It calls its network twice a step, and has pictures without frames from a VAE of videos."""
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16, num_layers=1, attention_head_dim=8, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, timestep_embed_dim=8, text_hidden_dim=16, num_text_layers=2, text_num_attention_heads=2,
        text_num_key_value_heads=1, text_intermediate_size=16, num_layerwise_text_blocks=1, num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2), rope_theta=1000.0,
    )  # fmt: skip
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    return diffusers.Krea2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=qwen_image().vae,
        text_encoder=transformers.Qwen3VLModel(
            transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
        ).eval(),
        tokenizer=qwen_tokenizer(),
        transformer=transformer,
        text_encoder_select_layers=(0, 1),
    )


def sana_video() -> DiffusionPipeline:
    """It counts frames by another name than others."""
    transformer = diffusers.SanaVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=1,
        num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=8,
        sample_size=8, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    text = transformers.Gemma2Config(
        vocab_size=600, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=4,
    )  # fmt: skip
    return diffusers.SanaVideoPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=8.0),
        vae=wan().vae,
        text_encoder=transformers.Gemma2Model(text).eval(),
        tokenizer=qwen_tokenizer(),
        transformer=transformer,
    )


def cogvideox() -> DiffusionPipeline:
    """Its noise has frames before channels."""
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=2, num_layers=1,
        text_embed_dim=32, sample_width=8, sample_height=4, sample_frames=9,
    )  # fmt: skip
    blocks = {"down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4}
    autoencoder = diffusers.AutoencoderKLCogVideoX(
        **blocks, block_out_channels=(8,) * 4, latent_channels=4, layers_per_block=1, norm_num_groups=2
    )
    return diffusers.CogVideoXPipeline(
        scheduler=diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True),
        vae=autoencoder.eval(), text_encoder=t5(), tokenizer=t5_tokenizer(), transformer=transformer,
    )  # fmt: skip


def pag() -> DiffusionPipeline:
    """By default it calls its network for each picture twice, with other attention."""
    return diffusers.StableDiffusionPAGPipeline(**stable_diffusion().components, requires_safety_checker=False)


def kontext() -> DiffusionPipeline:
    """By default it makes pictures of about a million pixels, whatever their size."""
    return diffusers.FluxKontextPipeline(**flux().components)


PIPELINES: dict[str, Callable[[], DiffusionPipeline]] = {
    made.__name__: made for made in (flux, sd3, sdxl, pixart, qwen_image, wan, ltx, stable_diffusion, chroma, z_image)
}

_SAVED: dict[str, Path] = {}


def made(name: str) -> DiffusionPipeline:
    """Returns a tiny pipeline; its values are the same each time."""
    torch.manual_seed(0)
    others = {each.__name__: each for each in (krea_2, sana_video, cogvideox, pag, kontext, longcat)}
    return (PIPELINES | others)[name]()


def network_of(pipeline: DiffusionPipeline) -> nn.Module:
    return getattr(pipeline, "transformer", None) or pipeline.unet


def saved(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of the caller's own with a tiny pipeline, which is saved once and copied for each."""
    if name not in _SAVED:
        _SAVED[name] = tmp_path_factory.mktemp(f"{name}_saved")
        made(name).save_pretrained(_SAVED[name])
    return shutil.copytree(_SAVED[name], tmp_path_factory.mktemp(name), dirs_exist_ok=True)
