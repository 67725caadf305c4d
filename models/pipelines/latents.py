"""Latents of pictures, as the network of a pipeline was trained on them: encoded by the VAE, then normalised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.pipelines.recording import CPU, Asked, NotTrainableError, Recorder, moved, places_in

# In the root mean square, of normally distributed numbers in bfloat16. Flux's shift, if left out, is twice as much.
ROUNDING = 0.02


def encoded(vae: nn.Module, pixels: Tensor, noise: Sequence[int]) -> Tensor:
    """Returns mean and standard deviation of a picture's normalised latents: float32 [2, *noise].

    Args:
        vae: an autoencoder of diffusers.
        pixels: float32 [3, H, W], or of a video [3, F, H, W], from -1 to 1, on the device of the VAE.
        noise: the shape in which the pipeline draws the noise of an example.

    Raises NotTrainableError if the VAE makes latents of another size.
    """
    # Of autoencoders of videos a picture is one frame.
    picture = pixels[None, :, None] if _of_videos(vae) and pixels.ndim == 3 else pixels[None]
    mean, std = _mean_and_std(vae, picture)
    shift, scale = normalisation(vae, mean.ndim)
    both = torch.cat([(mean.float() - shift) * scale, std.float() * scale])
    both = _frames_first(both, noise)
    if [size for size in both.shape[1:] if size > 1] != [size for size in noise if size > 1]:
        name = type(vae).__name__
        raise NotTrainableError(f"{name} makes latents {list(both.shape[1:])}, and the network takes {list(noise)}")
    return both.reshape(2, *noise)


def _frames_first(latents: Tensor, noise: Sequence[int]) -> Tensor:
    """Returns latents [B, C, F, ...] as [B, F, C, ...], where the noise of an example has that shape (CogVideoX)."""
    swapped = latents.transpose(1, 2)
    return swapped if latents.shape[1:] != tuple(noise) == swapped.shape[1:] else latents


def decoding(vae: nn.Module, size: tuple[int, int]) -> Callable[[], object]:
    """Returns a function that decodes latents of one picture of `size`, (height, width), on the device of the VAE."""
    frames = [1] if _of_videos(vae) else []
    latents, _ = _mean_and_std(vae, torch.empty(1, 3, *frames, *size, device=vae.device))
    return lambda: vae.decode(latents)


def _of_videos(vae: nn.Module) -> bool:
    return any(parameter.ndim == 5 for parameter in vae.parameters())


@torch.no_grad()
def _mean_and_std(vae: nn.Module, picture: Tensor) -> tuple[Tensor, Tensor]:
    try:
        found = vae.encode(picture.to(vae.dtype))
    except NotImplementedError as error:
        raise NotTrainableError(f"{type(vae).__name__}: {error}") from error
    if hasattr(found, "latent_dist"):
        return found.latent_dist.mean, found.latent_dist.std
    return found[0], torch.zeros_like(found[0])


def normalisation(vae: nn.Module, ndim: int) -> tuple[Any, Any]:
    """Returns what is taken from latents, and by what they are multiplied then, as numbers or for their channels."""
    mean, std = _numbers(vae, "latents_mean", ndim), _numbers(vae, "latents_std", ndim)
    factor = getattr(vae.config, "scaling_factor", None) or 1.0
    if mean is not None and std is not None:
        return mean, factor / std
    return getattr(vae.config, "shift_factor", None) or 0.0, factor


def check_normalisation(recorder: Recorder, vae: nn.Module, size: tuple[int, ...]) -> None:
    """Raises NotTrainableError where the pipeline decodes other latents than those that were normalised."""
    asked = Asked(("",), size, size)
    records = recorder.record_digits(asked)
    noise = records[0].noise
    places, _ = places_in([record.sample for record in records], torch.Size(noise[1:]).numel())
    raw = torch.randn(noise, generator=torch.Generator().manual_seed(0))
    decoded = recorder.decoded(asked, lambda latents: raw.flatten()[places].view(latents.shape).to(latents), vae)
    shift, scale = normalisation(vae, decoded.ndim)
    again = _frames_first((decoded.float().cpu() - moved(shift, CPU)) * moved(scale, CPU), noise[1:])
    if again.numel() != raw.numel() or float((again - raw.view(again.shape)).square().mean().sqrt()) > ROUNDING:
        raise NotTrainableError(
            f"{recorder.name} normalises the latents of {type(vae).__name__} in an unknown way, so its network cannot"
            " train here: take another pipeline"
        )


def _numbers(vae: nn.Module, name: str, ndim: int) -> Tensor | None:
    """Returns a list of numbers of a VAE's configuration, or a buffer of it, as a tensor [1, C, 1, ...]."""
    found = getattr(vae.config, name, None)
    found = dict(vae.named_buffers()).get(name) if found is None else found
    return None if found is None else torch.as_tensor(found).float().view(1, -1, *[1] * (ndim - 2)).to(vae.device)
