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
    "Transformer2DModel": "it is the block of other models, without a time",
    "TransformerTemporalModel": "it is the block of other models, without a time",
}


def reason_against(name: str) -> str | None:
    """Returns why the class `name` of diffusers cannot be called; None where nobody has looked at it."""
    return next((reason for pattern, reason in REASONS.items() if fnmatchcase(name, pattern)), None)
