"""The classes of diffusers that cannot be called as `model(noisy, timestep, **condition)`, with the reasons."""

from __future__ import annotations

from fnmatch import fnmatchcase

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
