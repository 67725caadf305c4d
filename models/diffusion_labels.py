"""Families of diffusion models whose conditions depend on several keys of the configuration: UNets and DiT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from models.diffusion_family import OTHER_LATENTS, TEXT_MASKS, Config, Family, Shape, joined, require, square, steps_of


class Unet(Family):
    """UNet2DModel: times 0 to 1000, class labels; further channels than those that it returns are `other_latents`."""

    def check(self, config: Config) -> None:
        if config["out_channels"] > config["in_channels"]:
            super().check(config)
        # Fourier features take the logarithm of the time, which may be 0; learnt ones take whole numbers.
        require(config, class_embed_type=None, time_embedding_type="positional")

    def condition_shapes(self, config: Config) -> dict[str, Shape]:
        shapes = {} if config["num_class_embeds"] is None else {"labels": ()}
        if further := config["in_channels"] - self.channels(config):
            shapes[OTHER_LATENTS] = (further, None, None)
        return shapes

    def sample_shape(self, config: Config) -> Shape | None:
        return square(self.channels(config), config["sample_size"])

    def channels(self, config: Config) -> int:
        return min(config["in_channels"], config["out_channels"])

    def num_labels(self, config: Config) -> int | None:
        return config["num_class_embeds"]

    def velocity(self, network: nn.Module, noisy: Tensor, timestep: Tensor, condition: dict[str, Tensor]) -> Tensor:
        noisy, condition = joined(noisy, condition)
        return network(noisy, steps_of(timestep), class_labels=condition.get("labels"), return_dict=False)[0]


class ConditionedUnet(Unet):
    """UNet2DConditionModel, with what its pipelines condition it on.

    A text: Stable Diffusion 1 and 2, XL (also a pooled text and the sizes of the image), DeepFloyd IF. An image's
    embedding: Kandinsky 2.2. Where a model also predicts a variance, that half of its output is left out.
    """

    masks: ClassVar[Mapping[str, str]] = TEXT_MASKS
    TOKENS, TIME_IDS = 77, 6
    KNOWN: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        "addition_embed_type": (None, "text", "text_time", "image"),
        "encoder_hid_dim_type": (None, "text_proj", "image_proj"),
    }

    def check(self, config: Config) -> None:
        if config["out_channels"] != 2 * config["in_channels"]:
            super().check(config)
        require(config, class_embed_type=None, time_embedding_type="positional", attention_type="default")
        for key, known in self.KNOWN.items():
            if config[key] not in known:
                names = ", ".join(name for name in known if name)
                raise ValueError(f"{key}={config[key]}: only {names} or null is supported in this model")

    def condition_shapes(self, config: Config) -> dict[str, Shape]:
        shapes, of_image = super().condition_shapes(config), config["encoder_hid_dim_type"] == "image_proj"
        if not of_image:
            width = config["encoder_hid_dim"] or config["cross_attention_dim"]
            shapes["encoder_hidden_states"] = (self.TOKENS, width if isinstance(width, int) else width[0])
        if of_image or config["addition_embed_type"] == "image":
            shapes["image_embeds"] = (config["encoder_hid_dim"],)
        if config["addition_embed_type"] == "text_time":
            of_sizes = self.TIME_IDS * config["addition_time_embed_dim"]
            shapes["text_embeds"] = (config["projection_class_embeddings_input_dim"] - of_sizes,)
            shapes["time_ids"] = (self.TIME_IDS,)
        return shapes

    def velocity(self, network: nn.Module, noisy: Tensor, timestep: Tensor, condition: dict[str, Tensor]) -> Tensor:
        added = {key: condition[key] for key in ("text_embeds", "time_ids", "image_embeds") if key in condition}
        latents, condition = joined(noisy, condition)
        output = network(
            latents,
            steps_of(timestep),
            condition.get("encoder_hidden_states"),
            class_labels=condition.get("labels"),
            encoder_attention_mask=condition.get("encoder_attention_mask"),
            added_cond_kwargs=added or None,
            return_dict=False,
        )[0]
        return output[:, : noisy.shape[1]]


class Dit(Family):
    """DiTTransformer2DModel (Peebles and Xie 2023): times 0 to 1000, class labels, latents of one size.

    Its own dropping of labels is off, because it would depend on the device. Where a model also predicts a variance
    (twice the channels), that half of its output is left out, as SiT does (Ma et al. 2024).
    """

    first_stds: ClassVar[Mapping[str, float]] = {
        "*.norm1.linear": 0.0,
        "proj_out_[12]": 0.0,
        "*.timestep_embedder.linear_[12]": 0.02,
        "*.class_embedder.embedding_table": 0.02,
    }

    def check(self, config: Config) -> None:
        if config["out_channels"] not in (None, config["in_channels"], 2 * config["in_channels"]):
            super().check(config)

    def condition_shapes(self, config: Config) -> dict[str, Shape]:
        return {"labels": ()}

    def num_labels(self, config: Config) -> int | None:
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
        output = network(noisy, steps_of(timestep), class_labels=condition["labels"], return_dict=False)[0]
        return output[:, : noisy.shape[1]]
