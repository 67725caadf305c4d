"""The classes of diffusers that are trained without a pipeline: the conditions of each, and how it is called.

Every other class is trained through its pipeline, which calls the network itself (`models.pipelines`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from models.diffusion_scheduler import STEPS

Shape = tuple[int | None, ...]
Config = Mapping[str, Any]
Conditions = Mapping[str, Tensor]
TEXT = "encoder_hidden_states"
# The mask of the text, bool [B, tokens].
TEXT_MASK = "encoder_attention_mask"
# The further input channels of a network that takes more channels than it returns, [B, C', ...]: the small image for
# upscaling, or the mask and the masked image for inpainting.
OTHER_LATENTS = "other_latents"


@dataclass(frozen=True)
class NetworkClass:
    """The calls, checks and initial values of the networks of one class.

    Attributes:
        conditions: returns, for a configuration, the shape of one example of each condition by name; () for labels.
        call: calls a network with latents [B, C, ...], times [B] and conditions; its output has the latents' layout.
        known: for some keys of the configuration, the supported values; with others a network needs further inputs.
        patch: the sides of a patch where the network takes a sequence of patches; () where it takes latents.
        steps: the number by which the network knows time 1; 1 if it takes times from 0 to 1 and no whole steps.
        takes_mask: whether the network takes `TEXT_MASK`.
        variance: whether the network may return twice the channels, the second half a variance.
        first_stds: the standard deviation of the first weights (0: zeros), by patterns of layers' names; layers that
            no pattern matches begin as torch's constructors make them.
    """

    conditions: Callable[[Config], dict[str, Shape]]
    call: Callable[[nn.Module, Tensor, Tensor, Conditions], Tensor]
    known: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    patch: tuple[int, ...] = ()
    steps: int = STEPS
    takes_mask: bool = False
    variance: bool = False
    first_stds: Mapping[str, float] = field(default_factory=dict)

    def check(self, config: Config) -> None:
        """Raises ValueError, which names a key and its value, if a network with this configuration cannot be called."""
        for key, values in self.known.items():
            if config[key] not in values:
                known = " or ".join(map(str, values))
                raise ValueError(f"{key}={config[key]}: only {key}={known} is supported in this model")
        taken, made, patch = config["in_channels"], config["out_channels"], prod(self.patch)
        if made is not None and made > taken and not (self.variance and made == 2 * taken):
            raise ValueError(f"out_channels={made}: the model must return as many channels as it takes, {taken}")
        if taken % patch or (made or 0) % patch:
            raise ValueError(f"in_channels={taken}: must be a multiple of {patch}, one patch")


def _of_unet(config: Config) -> dict[str, Shape]:
    return {} if config["num_class_embeds"] is None else {"labels": ()}


def _unet(network: nn.Module, latents: Tensor, times: Tensor, given: Conditions) -> Tensor:
    return network(latents, times, class_labels=given.get("labels"), return_dict=False)[0]


def _of_unet_with_text(config: Config) -> dict[str, Shape]:
    """Returns the shapes of the conditions of Stable Diffusion 1, 2 and XL, by name."""
    width = config["cross_attention_dim"]
    shapes = _of_unet(config) | {TEXT: (77, width if isinstance(width, int) else width[0])}
    if config["addition_embed_type"] == "text_time":
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        shapes |= {"text_embeds": (pooled,), "time_ids": (6,)}
    return shapes


def _unet_with_text(network: nn.Module, latents: Tensor, times: Tensor, given: Conditions) -> Tensor:
    return network(
        latents,
        times,
        given[TEXT],
        class_labels=given.get("labels"),
        encoder_attention_mask=given.get(TEXT_MASK),
        added_cond_kwargs={key: given[key] for key in ("text_embeds", "time_ids") if key in given},
        return_dict=False,
    )[0]


def _dit(network: nn.Module, latents: Tensor, times: Tensor, given: Conditions) -> Tensor:
    shape = (latents.shape[1], *[network.config["sample_size"]] * 2)
    if latents.shape[1:] != shape:
        # With another size the network would give patches wrong position embeddings, or fail.
        raise ValueError(f"the model takes images of shape {list(shape)}, not {list(latents.shape[1:])}")
    return _unet(network, latents, times, given)


def _flux(network: nn.Module, latents: Tensor, times: Tensor, given: Conditions) -> Tensor:
    batch, sizes, device = len(latents), latents.shape[2:], latents.device
    if any(size % 2 for size in sizes):
        raise ValueError(f"sizes of latents must be multiples of a patch [2, 2], not {list(sizes)}")
    rows, columns = (size // 2 for size in sizes)
    patches = latents.reshape(batch, -1, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5)
    places = torch.zeros(rows, columns, 3, device=device)
    places[..., 1] += torch.arange(rows, device=device)[:, None]
    places[..., 2] += torch.arange(columns, device=device)
    # The guidance scale of FLUX.1-dev, the default of diffusers' own training script.
    guided = {"guidance": torch.full_like(times, 3.5)} if network.config["guidance_embeds"] else {}
    output = network(
        hidden_states=patches.reshape(batch, rows * columns, -1),
        timestep=times,
        img_ids=places.view(-1, 3),
        txt_ids=torch.zeros(given[TEXT].shape[1], 3, device=device),
        **guided,
        **given,
        return_dict=False,
    )[0]
    return output.reshape(batch, rows, columns, -1, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, *sizes)


def _ltx(network: nn.Module, latents: Tensor, times: Tensor, given: Conditions) -> Tensor:
    frames, height, width = sizes = latents.shape[2:]
    output = network(
        hidden_states=latents.flatten(2).transpose(1, 2),
        timestep=times,
        num_frames=frames,
        height=height,
        width=width,
        # As diffusers' pipeline: 25 frames a second; a latent stands for 8 frames of 32 x 32 pixels.
        rope_interpolation_scale=(8 / 25, 32, 32),
        **{TEXT_MASK: None, **given},
        return_dict=False,
    )[0]
    return output.transpose(1, 2).unflatten(2, sizes)


# Only positional time embeddings: Fourier features take the logarithm of the time, which may be 0, and learnt
# embeddings take only whole numbers.
_UNET = {"class_embed_type": (None,), "time_embedding_type": ("positional",)}

CLASSES: dict[str, NetworkClass] = {
    "DiTTransformer2DModel": NetworkClass(
        lambda config: {"labels": ()},
        _dit,
        variance=True,
        # Peebles and Xie 2023: the modulation of adaLN-Zero and the last projection begin at zero.
        first_stds={
            "*.norm1.linear": 0.0,
            "proj_out_[12]": 0.0,
            "*.timestep_embedder.linear_[12]": 0.02,
            "*.class_embedder.embedding_table": 0.02,
        },
    ),
    "FluxTransformer2DModel": NetworkClass(
        lambda config: {
            TEXT: (512, config["joint_attention_dim"]),
            "pooled_projections": (config["pooled_projection_dim"],),
        },
        _flux,
        known={"patch_size": (1,)},
        patch=(2, 2),
        steps=1,
        first_stds={"*.norm*.linear": 0.0, "norm_out.linear": 0.0, "proj_out": 0.0},
    ),
    "LTXVideoTransformer3DModel": NetworkClass(
        lambda config: {TEXT: (128, config["caption_channels"])},
        _ltx,
        known={"patch_size": (1,), "patch_size_t": (1,)},
        patch=(1, 1, 1),
        takes_mask=True,
        # As in PixArt-alpha, whose modulation is adaLN-single (Chen et al. 2023).
        first_stds={
            "time_embed.linear": 0.02,
            "*.timestep_embedder.linear_[12]": 0.02,
            "caption_projection.linear_[12]": 0.02,
            "*.attn2.to_out.0": 0.0,
            "proj_out": 0.0,
        },
    ),
    "UNet2DConditionModel": NetworkClass(
        _of_unet_with_text,
        _unet_with_text,
        known={
            **_UNET,
            "attention_type": ("default",),
            "addition_embed_type": (None, "text_time"),
            "encoder_hid_dim": (None,),
            "encoder_hid_dim_type": (None,),
        },
        takes_mask=True,
        variance=True,
    ),
    "UNet2DModel": NetworkClass(_of_unet, _unet, known=_UNET),
}
