"""A table of the classes of diffusers: the conditions that each takes, with their sizes, and what follows from them.

`models.diffusion_family.Called` explains the columns. The values are those of the classes' own pipelines: scales and
directions of times, numbers of tokens, layouts. Models of other objectives (noise, EDM) learn velocities here.
"""

from __future__ import annotations

from typing import Any

from models.diffusion_family import Called, Family, Size
from models.diffusion_inputs import (
    CHANNELS_LAST,
    FRAMES_FIRST,
    Patches,
    PatchesInTraining,
    Separate,
    constant,
    guidance,
    layers_first,
    length_of,
    mask_of,
    mask_of_text_and_patches,
    number,
    one_by_one,
    padding,
    patch_counts,
    places,
    places_after_text,
    places_of_kandinsky,
    resolution,
    rotary_2d,
    rotary_of_allegro,
    rotary_of_lumina,
    rotary_of_sounds,
    rotary_of_videos,
    rounded_times,
    scaled_guidance,
    sizes_of_image,
    style_and_sizes,
    text_for_each_frame,
    video_sizes,
)
from models.diffusion_labels import ConditionedUnet, Dit, Unet

TEXT_MASK = "encoder_attention_mask"
SQUARE: tuple[Size, ...] = ("sample_size", "sample_size")
OF_VIDEO: tuple[Size, ...] = (
    # The first frame has a latent of its own.
    lambda config: (config["sample_frames"] - 1) // config.get("temporal_compression_ratio", 1) + 1,
    "sample_height",
    "sample_width",
)
# The modulation of adaLN-Zero and the last projection begin at zero (Peebles and Xie 2023).
ADALN_ZERO = {"*.norm1.linear": 0.0, "*.norm1_context.linear": 0.0, "norm_out.linear": 0.0, "proj_out": 0.0}
# PixArt-alpha (Chen et al. 2023), with the modulation of adaLN-single.
ADALN_SINGLE = {
    "*.timestep_embedder.linear_[12]": 0.02,
    "caption_projection.linear_[12]": 0.02,
    "*.attn2.to_out.0": 0.0,
    "proj_out": 0.0,
}
PAIRS = Patches((2, 2))


def _text(tokens: Size, width: Size) -> dict[str, tuple[Size, ...]]:
    return {"encoder_hidden_states": (tokens, width)}


def _pooled(tokens: Size, width: Size) -> dict[str, tuple[Size, ...]]:
    return {**_text(tokens, width), "pooled_projections": ("pooled_projection_dim",)}


_JOINT = "joint_attention_dim"
_FLUX: dict[str, Any] = {"layout": PAIRS, "steps": 1, "required": {"patch_size": 1}}
_COGVIDEO: dict[str, Any] = {
    "sizes": _text("max_text_seq_length", "text_embed_dim"),
    "layout": FRAMES_FIRST,
    "sample": OF_VIDEO,
    "beside": 3,
}
_COGVIEW: dict[str, Any] = {"inputs": (sizes_of_image,), "sample": SQUARE}
# The image of image-to-video is 257 tokens of CLIP, and latents beside those of the video.
_WAN: dict[str, Any] = {
    "sizes": {**_text(512, "text_dim"), "encoder_hidden_states_image": (257, "image_dim")},
    "required": {"pos_embed_seq_len": None},
    "beside": 3,
}

IMAGES: dict[str, Family] = {
    "AuraFlowTransformer2DModel": Called(sizes=_text(256, _JOINT), steps=1, sample=SQUARE),
    "BriaTransformer2DModel": Called(
        sizes=_text(128, _JOINT), layout=PAIRS, inputs=(places(),), required={"patch_size": 1, "guidance_embeds": False}
    ),
    "ChromaTransformer2DModel": Called(**_FLUX, sizes=_text(512, _JOINT), inputs=(places(), mask_of_text_and_patches)),
    "CogView3PlusTransformer2DModel": Called(**_COGVIEW, sizes=_text(224, "text_embed_dim")),
    "CogView4Transformer2DModel": Called(**_COGVIEW, sizes=_text(1024, "text_embed_dim"), beside=2),
    "DiTTransformer2DModel": Dit(),
    "ErnieImageTransformer2DModel": Called(
        sizes={"text_bth": (256, "text_in_dim")}, inputs=(length_of("text_lens", "text_bth"),), rounded=True
    ),
    "Flux2Transformer2DModel": Called(
        **_FLUX, sizes=_text(512, _JOINT), inputs=(places(axes=4, text_axes=(3,)), guidance(4.0))
    ),
    "FluxTransformer2DModel": Called(
        **_FLUX,
        sizes=_pooled(512, _JOINT),
        inputs=(places(), guidance(3.5)),
        beside=2,
        first_stds={"*.norm.linear": 0.0, **ADALN_ZERO},
    ),
    "HiDreamImageTransformer2DModel": Called(
        sizes={
            "encoder_hidden_states_t5": (128, "caption_channels.0"),
            "encoder_hidden_states_llama3": (lambda config: max(config["llama_layers"]) + 1, 128, "caption_channels.1"),
            "pooled_embeds": ("text_emb_dim",),
        },
        layout=PatchesInTraining(),
        inputs=(layers_first("encoder_hidden_states_llama3"),),
        time="timesteps",
        to_image=True,
    ),
    "HunyuanDiT2DModel": Called(
        sizes={
            "encoder_hidden_states": ("text_len", "cross_attention_dim"),
            "encoder_hidden_states_t5": ("text_len_t5", "cross_attention_dim_t5"),
        },
        inputs=(
            mask_of("text_embedding_mask"),
            mask_of("text_embedding_mask_t5", "encoder_hidden_states_t5"),
            style_and_sizes,
            rotary_2d,
        ),
        rounded=True,
        # Its key is learn_sigma.
        out_channels="in_channels",
        variance=True,
        sample=SQUARE,
    ),
    "HunyuanImageTransformer2DModel": Called(
        sizes={**_text(1000, "text_embed_dim"), "encoder_hidden_states_2": (128, "text_embed_2_dim")},
        inputs=(
            mask_of(TEXT_MASK),
            mask_of("encoder_attention_mask_2", "encoder_hidden_states_2"),
            guidance(3500.0, rounded=True),
        ),
        rounded=True,
        required={"use_meanflow": False},
    ),
    "Kandinsky3UNet": Called(
        sizes=_text(128, "encoder_hid_dim"), inputs=(mask_of(TEXT_MASK),), latents="sample", out_channels="in_channels"
    ),
    "LongCatImageTransformer2DModel": Called(**_FLUX, sizes=_text(512, _JOINT), inputs=(places_after_text,)),
    "Lumina2Transformer2DModel": Called(
        sizes=_text(256, "cap_feat_dim"), inputs=(mask_of(TEXT_MASK),), steps=1, from_noise=True, to_image=True
    ),
    "LuminaNextDiT2DModel": Called(
        sizes=_text(256, "cross_attention_dim"),
        inputs=(mask_of("encoder_mask"), rotary_of_lumina, constant(cross_attention_kwargs={})),
        steps=1,
        from_noise=True,
        to_image=True,
        out_channels="in_channels",
        variance=True,
        # The code of Lumina-T2X begins it so. The class in diffusers gives it no value, and does not use it.
        first_stds={"pad_token": 0.02},
    ),
    "OvisImageTransformer2DModel": Called(**_FLUX, sizes=_text(256, _JOINT), inputs=(places(text_axes=(1, 2)),)),
    "PixArtTransformer2DModel": Called(
        sizes=_text(120, "caption_channels|cross_attention_dim"),
        inputs=(resolution,),
        variance=True,
        sample=SQUARE,
        optional=(TEXT_MASK,),
        first_stds={"adaln_single.linear": 0.02, **ADALN_SINGLE},
    ),
    "PRXTransformer2DModel": Called(
        sizes=_text(256, "context_in_dim"), steps=1, out_channels="in_channels", optional=("attention_mask",)
    ),
    "QwenImageTransformer2DModel": Called(
        sizes=_text(512, _JOINT),
        layout=PAIRS,
        inputs=(patch_counts, guidance(1.0)),
        steps=1,
        out_channels=lambda config: 4 * (config["out_channels"] or config["in_channels"]),
        required={"patch_size": 2, "zero_cond_t": False, "use_additional_t_cond": False, "use_layer3d_rope": False},
    ),
    "SanaTransformer2DModel": Called(
        sizes=_text(300, "caption_channels"),
        inputs=(scaled_guidance(4.5),),
        steps=lambda config: 1000 * config["timestep_scale"],
        variance=True,
        sample=SQUARE,
        optional=(TEXT_MASK,),
    ),
    "SD3Transformer2DModel": Called(sizes=_pooled(333, _JOINT), sample=SQUARE, first_stds=ADALN_ZERO),
    "StableCascadeUNet": Called(
        sizes={
            "clip_text_pooled": (1, "clip_text_pooled_in_channels"),
            "clip_text": (77, "clip_text_in_channels"),
            "clip_img": (1, "clip_image_in_channels"),
        },
        latents="sample",
        time="timestep_ratio",
        steps=1,
        rounded=True,
        required={"effnet_in_channels": None, "pixel_mapper_in_channels": None},
    ),
    "UNet2DConditionModel": ConditionedUnet(),
    "UNet2DModel": Unet(),
    "ZImageTransformer2DModel": Called(
        sizes={"cap_feats": (512, "cap_feat_dim")},
        inputs=(one_by_one("cap_feats"),),
        layout=Separate(),
        latents="x",
        time="t",
        steps=1,
        from_noise=True,
        to_image=True,
        out_channels="in_channels",
        required={"siglip_feat_dim": None},
    ),
}
VIDEOS: dict[str, Family] = {
    "AllegroTransformer3DModel": Called(
        sizes=_text(512, "caption_channels"),
        inputs=(rotary_of_allegro,),
        sample=("sample_frames", "sample_height", "sample_width"),
        optional=(TEXT_MASK,),
    ),
    # The pipeline for image-to-video of its version 1.5 gives an offset of 2.
    "CogVideoXTransformer3DModel": Called(**_COGVIDEO, inputs=(rotary_of_videos, number("ofs", 2.0, "ofs_embed_dim"))),
    "ConsisIDTransformer3DModel": Called(**_COGVIDEO, inputs=(rotary_of_videos,), required={"is_train_face": False}),
    # Without the preconditioning of EDM.
    "CosmosTransformer3DModel": Called(
        sizes=_text(
            512, lambda c: c["crossattn_proj_in_channels" if c["use_crossattn_projection"] else "text_embed_dim"]
        ),
        inputs=(padding,),
        steps=1,
        required={"img_context_dim_in": None},
    ),
    "EasyAnimateTransformer3DModel": Called(
        sizes={**_text(256, "text_embed_dim"), "encoder_hidden_states_t5": (256, "text_embed_dim_t5")},
    ),
    "HunyuanVideo15Transformer3DModel": Called(
        sizes={
            **_text(1000, "text_embed_dim"),
            "encoder_hidden_states_2": (256, "text_embed_2_dim"),
            "image_embeds": (729, "image_embed_dim"),
        },
        inputs=(mask_of(TEXT_MASK), mask_of("encoder_attention_mask_2", "encoder_hidden_states_2")),
        rounded=True,
        required={"use_meanflow": False},
        # Latents of the first frame, and a mask.
        beside=3,
    ),
    "HunyuanVideoTransformer3DModel": Called(
        sizes=_pooled(256, "text_embed_dim"),
        inputs=(mask_of(TEXT_MASK), guidance(6000.0)),
        required={"image_condition_type": None},
    ),
    "I2VGenXLUNet": Called(
        sizes={
            **_text(77, "cross_attention_dim"),
            "image_embeddings": ("cross_attention_dim",),
        },
        inputs=(number("fps", 16.0),),
        latents="sample",
        beside=3,
        separate="image_latents",
    ),
    "Kandinsky5Transformer3DModel": Called(
        sizes={**_text(256, "in_text_dim"), "pooled_projections": ("in_text_dim2",)},
        inputs=(places_of_kandinsky,),
        layout=CHANNELS_LAST,
        rounded=True,
        adapted=rounded_times,
        in_channels=lambda config: (
            2 * config["in_visual_dim"] + 1 if config["visual_cond"] else config["in_visual_dim"]
        ),
        out_channels="out_visual_dim",
        required={"attention_type": "regular"},
        beside=3,
    ),
    "LatteTransformer3DModel": Called(
        sizes=_text(120, "caption_channels"),
        variance=True,
        sample=("video_length", *SQUARE),
        one_size=True,
        required={"norm_type": "ada_norm_single"},
        optional=(TEXT_MASK,),
    ),
    "LTXVideoTransformer3DModel": Called(
        sizes=_text(128, "caption_channels"),
        inputs=(video_sizes,),
        layout=Patches((1, 1, 1)),
        required={"patch_size": 1, "patch_size_t": 1},
        optional=(TEXT_MASK,),
        first_stds={"time_embed.linear": 0.02, **ADALN_SINGLE},
    ),
    "MochiTransformer3DModel": Called(
        sizes=_text(256, "text_embed_dim"), inputs=(mask_of(TEXT_MASK),), from_noise=True, to_image=True
    ),
    "SanaVideoTransformer3DModel": Called(
        sizes=_text(300, "caption_channels"), inputs=(scaled_guidance(4.5),), variance=True, optional=(TEXT_MASK,)
    ),
    "SkyReelsV2Transformer3DModel": Called(
        **_WAN | {"required": {"pos_embed_seq_len": None, "inject_sample_info": False}}
    ),
    "UNet3DConditionModel": Called(sizes=_text(77, "cross_attention_dim"), latents="sample"),
    "UNetMotionModel": Called(
        sizes=_text(77, "cross_attention_dim"),
        inputs=(text_for_each_frame,),
        latents="sample",
        required={"addition_embed_type": None, "encoder_hid_dim_type": None},
    ),
    # Stable Video Diffusion, without the preconditioning of EDM: an image's embedding, and its latents for each frame.
    "UNetSpatioTemporalConditionModel": Called(
        sizes={
            "encoder_hidden_states": (1, "cross_attention_dim"),
            # Frames a second, the strength of motion, and of the noise that the image has.
            "added_time_ids": (
                lambda config: config["projection_class_embeddings_input_dim"] // config["addition_time_embed_dim"],
            ),
        },
        layout=FRAMES_FIRST,
        latents="sample",
        beside=3,
    ),
    "WanTransformer3DModel": Called(
        **_WAN,
        first_stds={
            "condition_embedder.text_embedder.linear_[12]": 0.02,
            "condition_embedder.time_embedder.linear_[12]": 0.02,
            "proj_out": 0.0,
        },
    ),
}
OTHERS: dict[str, Family] = {
    # Embeddings [B, C] of images from those of texts.
    "PriorTransformer": Called(
        sizes={"proj_embedding": ("embedding_proj_dim|embedding_dim",), **_text("num_embeddings", "embedding_dim")},
        in_channels="embedding_dim",
        out_channels="clip_embed_dim",
        required={"encoder_hid_proj_type": "linear"},
    ),
    # Sounds [B, C, length].
    "StableAudioDiTModel": Called(
        sizes={
            **_text(130, "cross_attention_input_dim"),
            "global_hidden_states": (1, "global_states_input_dim"),
        },
        inputs=(rotary_of_sounds,),
        steps=1,
        sample=("sample_size",),
    ),
    "UNet1DModel": Called(
        latents="sample", steps=1, sample=("sample_size",), required={"time_embedding_type": "fourier"}
    ),
}
FAMILIES: dict[str, Family] = dict(sorted((IMAGES | VIDEOS | OTHERS).items()))
