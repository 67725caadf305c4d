"""A table of the classes of diffusers: the conditions that each takes, with their sizes, and what follows from them.

`models.diffusion_family.Called` explains the columns. The values are those of the classes' own pipelines: scales and
directions of times, numbers of tokens, layouts. Models of noise or v are called with whole steps instead of times;
those of EDM learn velocities here. Those of images are here, and `FAMILIES` has those of videos and sounds too.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from models.diffusion_family import (
    ADALN_SINGLE,
    SQUARE,
    TEXT_MASKS,
    Called,
    Family,
    sizes_of_text,
    sizes_of_texts,
)
from models.diffusion_inputs import (
    TEXT,
    TEXT_MASK,
    constant,
    exchanged,
    guidance,
    image_after_text,
    length_of,
    listed,
    listed_text,
    mask_of_bria,
    mask_of_text_and_patches,
    one_image,
    patch_counts,
    places,
    places_after_text,
    places_in_one,
    resolution,
    rotary_2d,
    rotary_of_lumina,
    scaled_guidance,
    sizes_of_image,
    style_and_sizes,
)
from models.diffusion_labels import ConditionedUnet, Dit, Unet
from models.diffusion_layouts import LastPatches, Patches, PatchesInTraining, Separate
from models.diffusion_videos import SOUNDS, VIDEOS

# The modulation of adaLN-Zero and the last projection begin at zero (Peebles and Xie 2023).
ADALN_ZERO = {"*.norm1.linear": 0.0, "*.norm1_context.linear": 0.0, "norm_out.linear": 0.0, "proj_out": 0.0}
PAIRS, SINGLES = Patches((2, 2)), Patches((1, 1))
_JOINT = "joint_attention_dim"
_FLUX: dict[str, Any] = {"layout": PAIRS, "steps": 1, "required": {"patch_size": 1}}
_COGVIEW: dict[str, Any] = {"inputs": (sizes_of_image,), "sample": SQUARE}
IMAGES: dict[str, Family] = {
    "AuraFlowTransformer2DModel": Called(sizes=sizes_of_text(256, _JOINT), steps=1, sample=SQUARE),
    "BriaTransformer2DModel": Called(
        sizes=sizes_of_text(128, _JOINT),
        layout=PAIRS,
        inputs=(places(),),
        required={"patch_size": 1, "guidance_embeds": False},
    ),
    # A layer of the text's encoder for each block.
    "BriaFiboTransformer2DModel": Called(
        sizes={
            **sizes_of_text(2048, _JOINT),
            "text_encoder_layers": (
                lambda config: config["num_layers"] + config["num_single_layers"],
                2048,
                "text_encoder_dim",
            ),
        },
        layout=SINGLES,
        inputs=(places(side=1), listed("text_encoder_layers", dim=1), mask_of_bria),
        masks=TEXT_MASKS,
        passes_masks=False,
        required={"patch_size": 1, "guidance_embeds": False},
    ),
    "ChromaTransformer2DModel": Called(
        **_FLUX,
        sizes=sizes_of_text(512, _JOINT),
        inputs=(places(), mask_of_text_and_patches("attention_mask", 2)),
        masks={"attention_mask": TEXT},
        needs_masks=True,
    ),
    "CogView3PlusTransformer2DModel": Called(**_COGVIEW, sizes=sizes_of_text(224, "text_embed_dim")),
    "CogView4Transformer2DModel": Called(**_COGVIEW, sizes=sizes_of_text(1024, "text_embed_dim"), beside=2),
    "DiTTransformer2DModel": Dit(),
    "DreamLiteUNetModel": ConditionedUnet(),
    "ErnieImageTransformer2DModel": Called(
        sizes={"text_bth": (256, "text_in_dim")},
        inputs=(length_of("text_lens"),),
        rounded=True,
        masks={TEXT_MASK: "text_bth"},
        needs_masks=True,
        passes_masks=False,
    ),
    "Flux2Transformer2DModel": Called(
        **_FLUX, sizes=sizes_of_text(512, _JOINT), inputs=(places(axes=4, text_axes=(3,)), guidance(4.0))
    ),
    # Without images to change, for which a third of its first blocks are.
    "Flux3Transformer2DModel": Called(
        layout=PAIRS,
        steps=1,
        rounded=True,
        sizes=sizes_of_text(512, _JOINT),
        inputs=(places(axes=4, text_axes=(3,), scale=0.5),),
        required={"flow_map": False},
    ),
    "FluxTransformer2DModel": Called(
        **_FLUX,
        sizes=sizes_of_texts(512, _JOINT),
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
        inputs=(exchanged("encoder_hidden_states_llama3", 0, 1),),
        time="timesteps",
        to_image=True,
    ),
    "HunyuanDiT2DModel": Called(
        sizes={
            "encoder_hidden_states": ("text_len", "cross_attention_dim"),
            "encoder_hidden_states_t5": ("text_len_t5", "cross_attention_dim_t5"),
        },
        inputs=(style_and_sizes, rotary_2d),
        masks={"text_embedding_mask": TEXT, "text_embedding_mask_t5": "encoder_hidden_states_t5"},
        needs_masks=True,
        rounded=True,
        # Its key is learn_sigma.
        out_channels="in_channels",
        variance=True,
        sample=SQUARE,
    ),
    "HunyuanImageTransformer2DModel": Called(
        sizes={**sizes_of_text(1000, "text_embed_dim"), "encoder_hidden_states_2": (128, "text_embed_2_dim")},
        inputs=(guidance(3500.0, rounded=True),),
        masks={**TEXT_MASKS, "encoder_attention_mask_2": "encoder_hidden_states_2"},
        needs_masks=True,
        rounded=True,
        required={"use_meanflow": False},
    ),
    "Kandinsky3UNet": Called(
        sizes=sizes_of_text(128, "encoder_hid_dim"),
        masks=TEXT_MASKS,
        needs_masks=True,
        latents="sample",
        out_channels="in_channels",
    ),
    "Krea2Transformer2DModel": Called(
        layout=PAIRS,
        steps=1,
        rounded=True,
        sizes={"encoder_hidden_states": ("num_text_layers", 512, "text_hidden_dim")},
        inputs=(exchanged("encoder_hidden_states", 1, 2), places_in_one),
        masks=TEXT_MASKS,
    ),
    "LongCatImageTransformer2DModel": Called(**_FLUX, sizes=sizes_of_text(512, _JOINT), inputs=(places_after_text,)),
    "Lumina2Transformer2DModel": Called(
        sizes=sizes_of_text(256, "cap_feat_dim"),
        masks=TEXT_MASKS,
        needs_masks=True,
        steps=1,
        from_noise=True,
        to_image=True,
    ),
    "LuminaNextDiT2DModel": Called(
        sizes=sizes_of_text(256, "cross_attention_dim"),
        inputs=(rotary_of_lumina, constant(cross_attention_kwargs={})),
        masks={"encoder_mask": TEXT},
        needs_masks=True,
        steps=1,
        from_noise=True,
        to_image=True,
        out_channels="in_channels",
        variance=True,
        # The code of Lumina-T2X begins it so. The class in diffusers gives it no value, and does not use it.
        first_stds={"pad_token": 0.02},
    ),
    "NucleusMoEImageTransformer2DModel": Called(
        sizes=sizes_of_text(1024, _JOINT),
        layout=PAIRS,
        inputs=(one_image,),
        masks={"encoder_hidden_states_mask": TEXT},
        needs_masks=True,
        steps=1,
        out_channels=lambda config: 4 * (config["out_channels"] or config["in_channels"]),
        required={"patch_size": 2},
        # The class gives them no value.
        first_stds={"*.img_mlp.experts": 0.02},
    ),
    "OvisImageTransformer2DModel": Called(
        **_FLUX, sizes=sizes_of_text(256, _JOINT), inputs=(places(text_axes=(1, 2)),)
    ),
    "PixArtTransformer2DModel": Called(
        sizes=sizes_of_text(120, "caption_channels|cross_attention_dim"),
        inputs=(resolution,),
        variance=True,
        sample=SQUARE,
        masks=TEXT_MASKS,
        first_stds={"adaln_single.linear": 0.02, **ADALN_SINGLE},
    ),
    "PRXTransformer2DModel": Called(
        sizes=sizes_of_text(256, "context_in_dim"),
        steps=1,
        out_channels="in_channels",
        masks={"attention_mask": TEXT},
    ),
    "QwenImage21Transformer2DModel": Called(
        sizes=sizes_of_text(512, "context_in_dim"),
        layout=LastPatches((1, 1)),
        inputs=(image_after_text,),
        masks={"encoder_hidden_states_mask": TEXT},
        steps=1,
        required={"patch_size": 1},
    ),
    "QwenImageTransformer2DModel": Called(
        sizes=sizes_of_text(512, _JOINT),
        layout=PAIRS,
        inputs=(patch_counts, guidance(1.0)),
        masks={"encoder_hidden_states_mask": TEXT},
        steps=1,
        out_channels=lambda config: 4 * (config["out_channels"] or config["in_channels"]),
        required={"patch_size": 2, "zero_cond_t": False, "use_additional_t_cond": False, "use_layer3d_rope": False},
    ),
    "SanaTransformer2DModel": Called(
        sizes=sizes_of_text(300, "caption_channels"),
        inputs=(scaled_guidance(4.5),),
        steps=lambda config: 1000 * config["timestep_scale"],
        variance=True,
        sample=SQUARE,
        masks=TEXT_MASKS,
    ),
    "SD3Transformer2DModel": Called(sizes=sizes_of_texts(333, _JOINT), sample=SQUARE, first_stds=ADALN_ZERO),
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
        inputs=(listed_text("cap_feats"),),
        masks={TEXT_MASK: "cap_feats"},
        passes_masks=False,
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
FAMILIES: dict[str, Family] = dict(sorted((IMAGES | VIDEOS | SOUNDS).items()))

# Why other classes cannot be called as `model(noisy, timestep, **condition)`.
_CODES = (
    "it encodes or decodes images, sounds or videos, and learns no velocity; task=flow_matching trains models of its"
    " latents"
)
_ADDS = "its output is added inside of another model, which would have to be called with it"
_EMBEDS = "it makes embeddings for another model, and no velocity"
_TWO = "it makes a video and a sound at once, and a batch has one kind of latents"
_CONTINUES = "it continues a video from frames in several sizes, with their places, and a batch has one size"
_BLOCK = "it is the block of other models, without a time"
_VIDEO_BESIDE = "it takes further videos (a pose, a face) in sizes of their own"
# By patterns over the names of classes; the first that matches counts.
REASONS: dict[str, str] = {
    "*ControlNetXS*": "it is two models in one, of which the second is called with an image of edges or depths",
    "*ControlNet*": _ADDS,
    "MotionAdapter": "it has the weights of UNetMotionModel, which is supported, and no forward of its own",
    "*Adapter": _ADDS,
    "Autoencoder*": _CODES,
    "AsymmetricAutoencoder*": _CODES,
    "*VAE*": _CODES,
    "*Vae": _CODES,
    "VQModel": _CODES,
    "*Vocoder": _CODES,
    "*Tokenizer": _CODES,
    "*Detokenizer": _CODES,
    "RFD4ProteinaAutoencoder": _CODES,
    "LTX2VideoTransformer3DModel": _TWO,
    "LTX2VideoDiffusionDecoderModel": _CODES,
    "Kandinsky6Transformer3DModel": _TWO,
    "MiniMaxH3Transformer3DModel": _TWO,
    "AnyFlowFARTransformer3DModel": _CONTINUES,
    "HeliosTransformer3DModel": _CONTINUES,
    "HunyuanVideoFramepackTransformer3DModel": _CONTINUES,
    "SanaWMLTX2RefinerTransformer3DModel": _CONTINUES,
    "SanaWMTransformer3DModel": "it takes the path of a camera for each frame, as rays that its pipeline makes",
    "WanAnimate*Transformer3DModel": _VIDEO_BESIDE,
    "JoyImageEditPlusTransformer3DModel": "it takes patches of several images in one sequence, each with its size",
    "BriaFibo2Transformer2DModel": "the number of tokens of its text is chosen by its mask in each forward",
    "Kandinsky6SRTransformer3DModel": "its output has the velocities of several steps at once",
    "Kandinsky6SRLatentUpscalerBank": "it enlarges latents in one call, without a time",
    "GlmImageTransformer2DModel": "it takes the image that a language model has drawn first, as token ids",
    "Cosmos3OmniTransformer": "it reads token ids and latents in one sequence, with places that its pipeline lays out",
    "Ideogram4Transformer2DModel": "it takes text and latents in one sequence, with the kind and text of each token",
    "Ideogram4PromptEnhancerHead": "it writes a text, and makes no velocity",
    "MiniMaxMusic3RVQDepthDecoder": "it predicts tokens of a sound, and no velocity",
    "RFD4ProteinaTransformer": "it makes proteins, of positions and features of atoms",
    "DreamLiteTransformer2DModel": _BLOCK,
    "OmniGenTransformer2DModel": "its text is token ids between those of images, and not an embedding",
    "UniDiffuserModel": "it makes an image and a text at once",
    "UVit2DModel": "it predicts masked tokens, and no velocity",
    "T5FilmDecoder": "it continues the spectrogram of an encoder of notes, which is another model",
    "*ProjectionModel": _EMBEDS,
    "*ImageProjection": _EMBEDS,
    "*ImageEncoder": _EMBEDS,
    "*ConditionEncoder": _EMBEDS,
    "*TextConditioner": _EMBEDS,
    "*DurationEmbedder": _EMBEDS,
    "*TextDecoder": "it writes a text, and makes no velocity",
    "Transformer2DModel": _BLOCK,
    "TransformerTemporalModel": _BLOCK,
}


def reason_against(name: str) -> str | None:
    """Returns why the class `name` of diffusers cannot be called; None where nobody has looked at it."""
    return next((reason for pattern, reason in REASONS.items() if fnmatchcase(name, pattern)), None)
