"""Calls diffusion models, each family with the inputs that it wants: a class of diffusers each.

The uniform call is `velocity(network, noisy, timestep, condition)`: noisy and velocity [B, C, H, W] (videos
[B, C, frames, H, W]), timestep float32 [B] from 0 (image) to 1 (noise), condition by name. A family scales times,
cuts images into the sequences of patches that transformers take, and adds the places of patches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
# Most models were trained on the numbers of 1000 steps.
STEPS = 1000


class Family(ABC):
    """The inputs of the models of one class of diffusers. `config` is the configuration of a model."""

    optional: tuple[str, ...] = ()
    """conditions that may be left out"""
    first_stds: ClassVar[dict[str, float]] = {}
    """how layers begin that do not begin as torch makes them: the standard deviation of their weights, 0 for zeros, by
    patterns over their names"""

    def check(self, config: Mapping[str, Any]) -> None:
        """Raises ValueError naming a key and its value, where a model of that configuration needs inputs not known."""
        self._require(config, in_channels=config["out_channels"] or config["in_channels"])

    def condition_shapes(self, config: Mapping[str, Any]) -> dict[str, Shape]:
        """Returns the shape of one example of each condition that the model needs; that of a label is ()."""
        return {}

    def num_labels(self, config: Mapping[str, Any]) -> int | None:
        """Returns the number of labels that have an embedding, that for no label included. None: no labels."""
        return None

    def sample_shape(self, config: Mapping[str, Any]) -> Shape | None:
        """Returns the shape of one image, [C, H, W]; None where the model takes any size."""
        return _square(config["in_channels"], config.get("sample_size"))

    def channels(self, config: Mapping[str, Any]) -> int:
        """Returns the channels of `noisy`."""
        return config["in_channels"]

    def adapt(self, network: nn.Module) -> None:
        """Changes the new model where it draws random numbers that the loop draws."""
        return

    @abstractmethod
    def velocity(self, network: nn.Module, noisy: Tensor, timestep: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Calls the model. `noisy` has its dtype, and so have the floating-point tensors of `condition`."""

    def _require(self, config: Mapping[str, Any], **values: Any) -> None:
        for key, value in values.items():
            if config[key] != value:
                raise ValueError(f"{key}={config[key]}: only {key}={value} is supported in this model")


class Unet(Family):
    """UNet2DModel: times 0 to 1000, class labels."""

    def check(self, config: Mapping[str, Any]) -> None:
        super().check(config)
        # Fourier features take the logarithm of the time, which may be 0; learnt ones take whole numbers.
        self._require(config, class_embed_type=None, time_embedding_type="positional")

    def condition_shapes(self, config: Mapping[str, Any]) -> dict[str, Shape]:
        return {} if config["num_class_embeds"] is None else {"labels": ()}

    def num_labels(self, config: Mapping[str, Any]) -> int | None:
        return config["num_class_embeds"]

    def velocity(self, network: nn.Module, noisy: Tensor, timestep: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return network(noisy, timestep * STEPS, class_labels=condition.get("labels"), return_dict=False)[0]


class ConditionedUnet(Unet):
    """UNet2DConditionModel: Stable Diffusion 1 and 2 (text), and XL (also a pooled text and the sizes of the image)."""

    optional = ("encoder_attention_mask",)
    TOKENS, TIME_IDS = 77, 6

    def check(self, config: Mapping[str, Any]) -> None:
        super().check(config)
        self._require(config, attention_type="default")
        for key, known in (("addition_embed_type", "text_time"), ("encoder_hid_dim_type", "text_proj")):
            if config[key] not in (None, known):
                raise ValueError(f"{key}={config[key]}: only {known} or null is supported in this model")

    def condition_shapes(self, config: Mapping[str, Any]) -> dict[str, Shape]:
        width = config["encoder_hid_dim"] or config["cross_attention_dim"]
        width = width if isinstance(width, int) else width[0]
        shapes = {**super().condition_shapes(config), "encoder_hidden_states": (self.TOKENS, width)}
        if config["addition_embed_type"] == "text_time":
            of_sizes = self.TIME_IDS * config["addition_time_embed_dim"]
            shapes["text_embeds"] = (config["projection_class_embeddings_input_dim"] - of_sizes,)
            shapes["time_ids"] = (self.TIME_IDS,)
        return shapes

    def velocity(self, network: nn.Module, noisy: Tensor, timestep: Tensor, condition: dict[str, Tensor]) -> Tensor:
        added = {name: condition[name] for name in ("text_embeds", "time_ids") if name in condition}
        return network(
            noisy,
            timestep * STEPS,
            condition["encoder_hidden_states"],
            class_labels=condition.get("labels"),
            encoder_attention_mask=condition.get("encoder_attention_mask"),
            added_cond_kwargs=added or None,
            return_dict=False,
        )[0]


class Dit(Family):
    """DiTTransformer2DModel (Peebles and Xie 2023): times 0 to 1000, class labels, latents of one size.

    Its own dropping of labels is off, because it would depend on the device. Of a model that also predicts a variance
    (twice the channels) that half is left out, as SiT does (Ma et al. 2024).
    """

    first_stds: ClassVar[dict[str, float]] = {
        "*.norm1.linear": 0.0,
        "proj_out_[12]": 0.0,
        "*.timestep_embedder.linear_[12]": 0.02,
        "*.class_embedder.embedding_table": 0.02,
    }

    def check(self, config: Mapping[str, Any]) -> None:
        if config["out_channels"] not in (None, config["in_channels"], 2 * config["in_channels"]):
            super().check(config)

    def condition_shapes(self, config: Mapping[str, Any]) -> dict[str, Shape]:
        return {"labels": ()}

    def num_labels(self, config: Mapping[str, Any]) -> int | None:
        return config["num_embeds_ada_norm"] + 1

    def adapt(self, network: nn.Module) -> None:
        from diffusers.models.embeddings import LabelEmbedding

        for module in network.modules():
            if isinstance(module, LabelEmbedding):
                module.dropout_prob = 0.0

    def velocity(self, network: nn.Module, noisy: Tensor, timestep: Tensor, condition: dict[str, Tensor]) -> Tensor:
        shape = self.sample_shape(network.config)
        if tuple(noisy.shape[1:]) != shape:
            # It would take other places for the patches, or none at all.
            raise ValueError(f"the model takes images of shape {list(shape)}, not {list(noisy.shape[1:])}")
        output = network(noisy, timestep * STEPS, class_labels=condition["labels"], return_dict=False)[0]
        return output[:, : noisy.shape[1]]


class Sd3(Family):
    """SD3Transformer2DModel (Esser et al. 2024): times 0 to 1000, text and pooled text. Begins as DiT does."""

    first_stds: ClassVar[dict[str, float]] = {
        "*.norm1.linear": 0.0,
        "*.norm1_context.linear": 0.0,
        "norm_out.linear": 0.0,
        "proj_out": 0.0,
    }
    TOKENS = 333

    def condition_shapes(self, config: Mapping[str, Any]) -> dict[str, Shape]:
        return {
            "encoder_hidden_states": (self.TOKENS, config["joint_attention_dim"]),
            "pooled_projections": (config["pooled_projection_dim"],),
        }

    def velocity(self, network: nn.Module, noisy: Tensor, timestep: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return network(noisy, timestep=timestep * STEPS, **condition, return_dict=False)[0]


class Flux(Family):
    """FluxTransformer2DModel: times 0 to 1, patches of 2 x 2 latents with places, text and pooled text.

    A model with an embedding for the guidance scale gets GUIDANCE, as in diffusers' own training of such models. It
    begins as DiT does.
    """

    first_stds: ClassVar[dict[str, float]] = {
        "*.norm.linear": 0.0,
        "*.norm1.linear": 0.0,
        "*.norm1_context.linear": 0.0,
        "norm_out.linear": 0.0,
        "proj_out": 0.0,
    }
    TOKENS, PATCH, GUIDANCE = 512, 2, 3.5

    def check(self, config: Mapping[str, Any]) -> None:
        super().check(config)
        self._require(config, patch_size=1)
        if config["in_channels"] % self.PATCH**2:
            raise ValueError(f"in_channels={config['in_channels']}: must be a multiple of {self.PATCH**2}, one patch")

    def channels(self, config: Mapping[str, Any]) -> int:
        return config["in_channels"] // self.PATCH**2

    def sample_shape(self, config: Mapping[str, Any]) -> Shape | None:
        return None

    def condition_shapes(self, config: Mapping[str, Any]) -> dict[str, Shape]:
        return {
            "encoder_hidden_states": (self.TOKENS, config["joint_attention_dim"]),
            "pooled_projections": (config["pooled_projection_dim"],),
        }

    def velocity(self, network: nn.Module, noisy: Tensor, timestep: Tensor, condition: dict[str, Tensor]) -> Tensor:
        batch, channels, height, width = noisy.shape
        if height % self.PATCH or width % self.PATCH:
            raise ValueError(f"height and width of latents must be multiples of {self.PATCH}, not {height} and {width}")
        rows, columns = height // self.PATCH, width // self.PATCH
        patches = noisy.view(batch, channels, rows, self.PATCH, columns, self.PATCH)
        patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, -1)
        places = noisy.new_zeros((rows, columns, 3), dtype=torch.float32)
        places[..., 1] += torch.arange(rows, device=noisy.device)[:, None]
        places[..., 2] += torch.arange(columns, device=noisy.device)
        guidance = None
        if network.config["guidance_embeds"]:
            guidance = torch.full_like(timestep, self.GUIDANCE)
        output = network(
            hidden_states=patches,
            encoder_hidden_states=condition["encoder_hidden_states"],
            pooled_projections=condition["pooled_projections"],
            timestep=timestep,
            img_ids=places.view(-1, 3),
            txt_ids=places.new_zeros((condition["encoder_hidden_states"].shape[1], 3)),
            guidance=guidance,
            return_dict=False,
        )[0]
        output = output.view(batch, rows, columns, channels, self.PATCH, self.PATCH)
        return output.permute(0, 3, 1, 4, 2, 5).reshape(noisy.shape)


class LtxVideo(Family):
    """LTXVideoTransformer3DModel: latents of videos [B, C, frames, H, W], times 0 to 1000, text.

    Places are in seconds and pixels of a video of FRAMES_PER_SECOND; a latent stands for 8 frames of 32 x 32 pixels. It
    begins as PixArt-alpha does (Chen et al. 2023), whose modulation of adaLN-single it has.
    """

    first_stds: ClassVar[dict[str, float]] = {
        "time_embed.linear": 0.02,
        "*.timestep_embedder.linear_[12]": 0.02,
        "caption_projection.linear_[12]": 0.02,
        "*.attn2.to_out.0": 0.0,
        "proj_out": 0.0,
    }
    optional = ("encoder_attention_mask",)
    TOKENS, FRAMES_PER_SECOND, FRAMES, PIXELS = 128, 25, 8, 32

    def check(self, config: Mapping[str, Any]) -> None:
        super().check(config)
        self._require(config, patch_size=1, patch_size_t=1)

    def sample_shape(self, config: Mapping[str, Any]) -> Shape | None:
        return None

    def condition_shapes(self, config: Mapping[str, Any]) -> dict[str, Shape]:
        return {"encoder_hidden_states": (self.TOKENS, config["caption_channels"])}

    def velocity(self, network: nn.Module, noisy: Tensor, timestep: Tensor, condition: dict[str, Tensor]) -> Tensor:
        frames, height, width = noisy.shape[2:]
        output = network(
            hidden_states=noisy.flatten(2).transpose(1, 2),
            encoder_hidden_states=condition["encoder_hidden_states"],
            timestep=timestep * STEPS,
            encoder_attention_mask=condition.get("encoder_attention_mask"),
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=(self.FRAMES / self.FRAMES_PER_SECOND, self.PIXELS, self.PIXELS),
            return_dict=False,
        )[0]
        return output.transpose(1, 2).reshape(noisy.shape)


class Wan(Family):
    """WanTransformer3DModel (text to video): latents [B, C, frames, H, W], times 0 to 1000, text.

    Its embeddings and its last projection begin as in the code of Wan (Wan Team 2025).
    """

    first_stds: ClassVar[dict[str, float]] = {
        "condition_embedder.text_embedder.linear_[12]": 0.02,
        "condition_embedder.time_embedder.linear_[12]": 0.02,
        "proj_out": 0.0,
    }
    TOKENS = 512

    def check(self, config: Mapping[str, Any]) -> None:
        super().check(config)
        self._require(config, image_dim=None)

    def sample_shape(self, config: Mapping[str, Any]) -> Shape | None:
        return None

    def condition_shapes(self, config: Mapping[str, Any]) -> dict[str, Shape]:
        return {"encoder_hidden_states": (self.TOKENS, config["text_dim"])}

    def velocity(self, network: nn.Module, noisy: Tensor, timestep: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return network(noisy, timestep * STEPS, condition["encoder_hidden_states"], return_dict=False)[0]


FAMILIES: dict[str, Family] = {
    "DiTTransformer2DModel": Dit(),
    "FluxTransformer2DModel": Flux(),
    "LTXVideoTransformer3DModel": LtxVideo(),
    "SD3Transformer2DModel": Sd3(),
    "UNet2DConditionModel": ConditionedUnet(),
    "UNet2DModel": Unet(),
    "WanTransformer3DModel": Wan(),
}


def _square(channels: int, size: int | list[int] | None) -> Shape | None:
    if size is None:
        return None
    return (channels, size, size) if isinstance(size, int) else (channels, *size)
