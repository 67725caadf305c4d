"""The classes of diffusers that make videos and sounds, and embeddings of images: rows as in
`models.diffusion_families`.

Latents of a video are [B, C, frames, H, W], of a sound [B, C, length]; AudioLDM 2 makes spectrograms, [B, C, frames,
bands].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from models.diffusion_family import (
    ADALN_SINGLE,
    SQUARE,
    TEXT_MASKS,
    Called,
    Config,
    Family,
    Size,
    sizes_of_text,
    sizes_of_texts,
)
from models.diffusion_inputs import (
    TEXT,
    exchanged,
    guidance,
    mask_for_each_frame,
    no_latents,
    number,
    padding,
    places_of_kandinsky,
    rotary_of_allegro,
    rotary_of_sounds,
    rotary_of_videos,
    same_time,
    scaled_guidance,
    text_for_each_frame,
    times_of_frames,
    video_sizes,
)
from models.diffusion_layouts import CHANNELS_LAST, FRAMES_FIRST, LENGTH_FIRST, Patches

OF_VIDEO: tuple[Size, ...] = (
    # The first frame has a latent of its own.
    lambda config: (config["sample_frames"] - 1) // config.get("temporal_compression_ratio", 1) + 1,
    "sample_height",
    "sample_width",
)
_COGVIDEO: dict[str, Any] = {
    "sizes": sizes_of_text("max_text_seq_length", "text_embed_dim"),
    "layout": FRAMES_FIRST,
    "sample": OF_VIDEO,
    "beside": 3,
}
# The image of image-to-video is 257 tokens of CLIP, and latents beside those of the video.
_WAN: dict[str, Any] = {
    "sizes": {**sizes_of_text(512, "text_dim"), "encoder_hidden_states_image": (257, "image_dim")},
    "required": {"pos_embed_seq_len": None},
    "beside": 3,
}


VIDEOS: dict[str, Family] = {
    "AllegroTransformer3DModel": Called(
        sizes=sizes_of_text(512, "caption_channels"),
        inputs=(rotary_of_allegro,),
        sample=("sample_frames", "sample_height", "sample_width"),
        masks=TEXT_MASKS,
    ),
    "AnyFlowTransformer3DModel": Called(
        sizes={**sizes_of_text(512, "text_dim"), "encoder_hidden_states_image": (257, "image_dim")},
        layout=FRAMES_FIRST,
        inputs=(times_of_frames,),
        # Its times are among the inputs.
        steps=1,
    ),
    "ChronoEditTransformer3DModel": Called(**_WAN),
    # The pipeline for image-to-video of its version 1.5 gives an offset of 2.
    "CogVideoXTransformer3DModel": Called(**_COGVIDEO, inputs=(rotary_of_videos, number("ofs", 2.0, "ofs_embed_dim"))),
    "ConsisIDTransformer3DModel": Called(**_COGVIDEO, inputs=(rotary_of_videos,), required={"is_train_face": False}),
    # Without the preconditioning of EDM.
    "CosmosTransformer3DModel": Called(
        sizes=sizes_of_text(
            512, lambda c: c["crossattn_proj_in_channels" if c["use_crossattn_projection"] else "text_embed_dim"]
        ),
        inputs=(padding,),
        steps=1,
        required={"img_context_dim_in": None},
    ),
    "EasyAnimateTransformer3DModel": Called(
        sizes={**sizes_of_text(256, "text_embed_dim"), "encoder_hidden_states_t5": (256, "text_embed_dim_t5")},
    ),
    "HunyuanVideo15Transformer3DModel": Called(
        sizes={
            **sizes_of_text(1000, "text_embed_dim"),
            "encoder_hidden_states_2": (256, "text_embed_2_dim"),
            "image_embeds": (729, "image_embed_dim"),
        },
        masks={**TEXT_MASKS, "encoder_attention_mask_2": "encoder_hidden_states_2"},
        needs_masks=True,
        rounded=True,
        required={"use_meanflow": False},
        # Latents of the first frame, and a mask.
        beside=3,
    ),
    "HunyuanVideoTransformer3DModel": Called(
        sizes=sizes_of_texts(256, "text_embed_dim"),
        inputs=(guidance(6000.0),),
        masks=TEXT_MASKS,
        needs_masks=True,
        required={"image_condition_type": None},
    ),
    "I2VGenXLUNet": Called(
        sizes={
            **sizes_of_text(77, "cross_attention_dim"),
            "image_embeddings": ("cross_attention_dim",),
        },
        inputs=(number("fps", 16.0),),
        latents="sample",
        beside=3,
        separate={"image_latents": "in_channels"},
    ),
    # One image, as a video of a frame, or several.
    "JoyImageEditTransformer3DModel": Called(sizes=sizes_of_text(1024, "text_dim")),
    "Kandinsky5Transformer3DModel": Called(
        sizes={**sizes_of_text(256, "in_text_dim"), "pooled_projections": ("in_text_dim2",)},
        inputs=(places_of_kandinsky,),
        layout=CHANNELS_LAST,
        rounded=True,
        in_channels=lambda config: (
            2 * config["in_visual_dim"] + 1 if config["visual_cond"] else config["in_visual_dim"]
        ),
        out_channels="out_visual_dim",
        required={"attention_type": "regular"},
        beside=3,
    ),
    "LatteTransformer3DModel": Called(
        sizes=sizes_of_text(120, "caption_channels"),
        inputs=(mask_for_each_frame,),
        variance=True,
        sample=("video_length", *SQUARE),
        one_size=True,
        required={"norm_type": "ada_norm_single"},
        masks=TEXT_MASKS,
    ),
    "LTXVideoTransformer3DModel": Called(
        sizes=sizes_of_text(128, "caption_channels"),
        inputs=(video_sizes,),
        layout=Patches((1, 1, 1)),
        required={"patch_size": 1, "patch_size_t": 1},
        masks=TEXT_MASKS,
        first_stds={"time_embed.linear": 0.02, **ADALN_SINGLE},
    ),
    "MochiTransformer3DModel": Called(
        sizes=sizes_of_text(256, "text_embed_dim"), masks=TEXT_MASKS, needs_masks=True, from_noise=True, to_image=True
    ),
    "MotifVideoTransformer3DModel": Called(
        sizes={**sizes_of_text(512, "text_embed_dim"), "image_embeds": (256, "image_embed_dim")},
        masks=TEXT_MASKS,
        needs_masks=True,
        # Latents of the first frame, and a mask.
        beside=3,
    ),
    "SanaVideoTransformer3DModel": Called(
        sizes=sizes_of_text(300, "caption_channels"),
        inputs=(scaled_guidance(4.5),),
        variance=True,
        masks=TEXT_MASKS,
    ),
    "SkyReelsV2Transformer3DModel": Called(
        **_WAN | {"required": {"pos_embed_seq_len": None, "inject_sample_info": False}}
    ),
    "UNet3DConditionModel": Called(sizes=sizes_of_text(77, "cross_attention_dim"), latents="sample"),
    "UNetMotionModel": Called(
        sizes=sizes_of_text(77, "cross_attention_dim"),
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
    # What is to be seen of the video and what is not, and a mask.
    "WanVACETransformer3DModel": Called(**_WAN, separate={"control_hidden_states": "vace_in_channels"}),
    "WanTransformer3DModel": Called(
        **_WAN,
        first_stds={
            "condition_embedder.text_embedder.linear_[12]": 0.02,
            "condition_embedder.time_embedder.linear_[12]": 0.02,
            "proj_out": 0.0,
        },
    ),
}


def _width_of_text(place: int) -> Callable[[Config], int]:
    """Returns what finds the width of a text in AudioLDM 2, whose blocks have a layer for each width, null for none."""

    def found(config: Config) -> int:
        widths = config["cross_attention_dim"]
        if not isinstance(widths, (list, tuple)) or not isinstance(widths[0], (list, tuple)) or len(widths[0]) != 3:
            raise ValueError(
                f"cross_attention_dim={widths}: only three widths for each block are supported in this model, as"
                " [null, 768, 1024]"
            )
        return widths[0][place]

    return found


_GPT2, _T5 = _width_of_text(1), _width_of_text(2)
_HIDDEN: Size = "encoder_hidden_size|hidden_size"

SOUNDS: dict[str, Family] = {
    # Its time is also the target of the step, so that the step has no length.
    "AceStepTransformer1DModel": Called(
        sizes={TEXT: (256, _HIDDEN)},
        separate={"context_latents": lambda config: config["in_channels"] - config["audio_acoustic_hidden_dim"]},
        beside=1,
        inputs=(exchanged("context_latents", 1, 2), same_time("timestep_r")),
        layout=LENGTH_FIRST,
        steps=1,
        rounded=True,
        in_channels="audio_acoustic_hidden_dim",
        out_channels="audio_acoustic_hidden_dim",
    ),
    "AudioLDM2UNet2DConditionModel": Called(
        sizes={TEXT: (8, _GPT2), f"{TEXT}_1": (128, _T5)},
        masks={**TEXT_MASKS, "encoder_attention_mask_1": f"{TEXT}_1"},
        needs_masks=True,
        latents="sample",
        required={"class_embed_type": None, "time_embedding_type": "positional"},
    ),
    "LongCatAudioDiTTransformer": Called(
        sizes={TEXT: (512, "dit_text_dim")},
        inputs=(no_latents("latent_cond"),),
        masks=TEXT_MASKS,
        needs_masks=True,
        layout=LENGTH_FIRST,
        steps=1,
        in_channels="latent_dim",
        out_channels="latent_dim",
    ),
    # A state of the language model for each latent.
    "MiniMaxMusic3Transformer1DModel": Called(
        separate={TEXT: "condition_dim"},
        beside=1,
        inputs=(exchanged(TEXT, 1, 2),),
        steps=1,
        rounded=True,
        from_noise=True,
        to_image=True,
        out_channels="in_channels",
    ),
    # Embeddings [B, C] of images from those of texts.
    "PriorTransformer": Called(
        sizes={
            "proj_embedding": ("embedding_proj_dim|embedding_dim",),
            TEXT: ("num_embeddings", "embedding_dim"),
        },
        masks={"attention_mask": TEXT},
        in_channels="embedding_dim",
        out_channels="clip_embed_dim",
        required={"encoder_hid_proj_type": "linear"},
    ),
    "StableAudioDiTModel": Called(
        sizes={
            TEXT: (130, "cross_attention_input_dim"),
            "global_hidden_states": (1, "global_states_input_dim"),
        },
        inputs=(rotary_of_sounds,),
        steps=1,
        sample=("sample_size",),
    ),
    # Without the sound beside a gap that it could fill.
    "StableAudio3DiTModel": Called(
        sizes={TEXT: (256, "cond_token_dim"), "global_hidden_states": ("global_cond_dim",)},
        masks=TEXT_MASKS,
        needs_masks=True,
        steps=1,
        rounded=True,
        in_channels="io_channels",
        out_channels="io_channels",
    ),
    "UNet1DModel": Called(
        latents="sample", steps=1, sample=("sample_size",), required={"time_embedding_type": "fourier"}
    ),
}
