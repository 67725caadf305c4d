"""The classes of diffusers that make sounds, and embeddings of images: rows as in `models.diffusion_families`.

Latents of a sound are [B, C, length]; AudioLDM 2 makes spectrograms, [B, C, frames, bands].
"""

from __future__ import annotations

from collections.abc import Callable

from models.diffusion_family import TEXT_MASK, Called, Config, Family, Size
from models.diffusion_inputs import (
    TEXT,
    mask_of,
    no_latents,
    rotary_of_sounds,
    same_time,
    turned,
)
from models.diffusion_layouts import Moved

# [B, length, C]
LENGTH_FIRST = Moved(1)


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
        inputs=(turned("context_latents"), same_time("timestep_r")),
        layout=LENGTH_FIRST,
        steps=1,
        rounded=True,
        in_channels="audio_acoustic_hidden_dim",
        out_channels="audio_acoustic_hidden_dim",
    ),
    "AudioLDM2UNet2DConditionModel": Called(
        sizes={TEXT: (8, _GPT2), f"{TEXT}_1": (128, _T5)},
        inputs=(mask_of("encoder_attention_mask_1", f"{TEXT}_1"),),
        latents="sample",
        required={"class_embed_type": None, "time_embedding_type": "positional"},
    ),
    "LongCatAudioDiTTransformer": Called(
        sizes={TEXT: (512, "dit_text_dim")},
        inputs=(mask_of(TEXT_MASK), no_latents("latent_cond")),
        layout=LENGTH_FIRST,
        steps=1,
        in_channels="latent_dim",
        out_channels="latent_dim",
    ),
    # A state of the language model for each latent.
    "MiniMaxMusic3Transformer1DModel": Called(
        separate={TEXT: "condition_dim"},
        beside=1,
        inputs=(turned(TEXT),),
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
        inputs=(mask_of(TEXT_MASK),),
        steps=1,
        rounded=True,
        in_channels="io_channels",
        out_channels="io_channels",
    ),
    "UNet1DModel": Called(
        latents="sample", steps=1, sample=("sample_size",), required={"time_embedding_type": "fourier"}
    ),
}
