"""Diffusion models of diffusers without a pipeline, called as `model(noisy, timestep, **condition) -> velocity`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.diffusion_classes import CLASSES, OTHER_LATENTS, TEXT, TEXT_MASK, NetworkClass
from models.diffusion_files import CONFIG_FILE, PIPELINE_FILE, config_folder
from models.diffusion_network import DiffusersNetwork, build_network, read_config
from models.diffusion_scheduler import library
from models.quiet_imports import without_remarks

# Shapes of well-known models: the class of diffusers, and its configuration.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Peebles and Xie 2023, DiT-XL/2 for latents of 256 x 256 pixels. It has 675M parameters; diffusers keeps a copy of
    # the embeddings of times and labels in each of the 28 blocks, which makes 750M.
    "dit_xl": (
        "DiTTransformer2DModel",
        {
            "sample_size": 32,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 28,
            "num_attention_heads": 16,
            "attention_head_dim": 72,
            "num_embeds_ada_norm": 1000,
        },
    ),
    # Black Forest Labs 2024, FLUX.1-dev.
    "flux": ("FluxTransformer2DModel", {"guidance_embeds": True}),
    # The same kinds of layers in a twelfth of the weights.
    "flux_small": (
        "FluxTransformer2DModel",
        {"guidance_embeds": True, "num_layers": 6, "num_single_layers": 12, "num_attention_heads": 12},
    ),
    # Podell et al. 2023.
    "sdxl_unet": (
        "UNet2DConditionModel",
        {
            "sample_size": 128,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "attention_head_dim": [5, 10, 20],
            "block_out_channels": [320, 640, 1280],
            "cross_attention_dim": 2048,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "layers_per_block": 2,
            "projection_class_embeddings_input_dim": 2816,
            "transformer_layers_per_block": [1, 2, 10],
            "use_linear_projection": True,
        },
    ),
    # For letters of 16 pixels in eight classes: large enough to draw them, small enough for a CPU.
    "unet_small": (
        "UNet2DModel",
        {
            "sample_size": 16,
            "in_channels": 1,
            "out_channels": 1,
            "block_out_channels": [32, 64],
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "attention_head_dim": 16,
            "num_class_embeds": 9,
            "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
            "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
        },
    ),
    # HaCohen et al. 2024, the model of 2B parameters.
    "ltx_video": ("LTXVideoTransformer3DModel", {}),
}


class DiffusionModel(DiffusersNetwork):
    """A network whose class has an entry in `models.diffusion_classes.CLASSES`, which says how to call the network."""

    def __init__(self, network: nn.Module, row: NetworkClass):
        super().__init__(network)
        config, self._row = network.config, row
        # Some classes take more channels than they return, others return a variance too.
        taken, patch = config["in_channels"], prod(row.patch)
        self._channels = min(taken, config["out_channels"] or taken) // patch
        self.condition_shapes = row.conditions(config)
        if further := taken // patch - self._channels:
            self.condition_shapes[OTHER_LATENTS] = (further, *[None] * (len(row.patch) or 2))
        self.optional_conditions = (TEXT_MASK,) if row.takes_mask else ()
        if size := config.get("sample_size"):
            self.sample_shape = (self._channels, *((size, size) if isinstance(size, int) else size))
        labels = config.get("num_embeds_ada_norm")
        self.num_labels = config.get("num_class_embeds") if labels is None else labels + 1
        self.takes_steps, self.first_stds = row.steps != 1, row.first_stds
        from diffusers.models.embeddings import LabelEmbedding

        for module in network.modules():
            if isinstance(module, LabelEmbedding):
                # The layer would drop labels by random numbers of the device, which differ from device to device.
                module.dropout_prob = 0.0

    def forward(self, noisy: Tensor, timestep: Tensor, **condition: Tensor) -> Tensor:
        """Predicts the velocity from image to noise; for whole steps what the network was trained on, such as noise.

        Args:
            noisy: [B, C, H, W], or [B, C, frames, H, W] of a video; converted to the model's dtype.
            timestep: float32 [B], from 0 (image) to 1 (noise); or int64 [B], steps from 0 (image) to 999 (noise).
            condition: `labels`, int64 [B], and embeddings, as in `condition_shapes`; and the mask of the text, bool
                [B, tokens], True where a token counts. Without a mask all tokens count.

        Returns:
            The prediction, with the shape of `noisy`, in the model's dtype. Where the network also returns a variance,
            as the second half of its channels, the variance is left out, as in SiT (Ma et al. 2024).

        Raises ValueError if a condition is missing or unknown, if the model does not take images of this shape, or if
        `timestep` has whole steps and the model takes only times.
        """
        self._check(noisy, timestep, condition)
        noisy, given = noisy.to(self.network.dtype), self._in_own_dtype(condition)
        latents = torch.cat([noisy, given.pop(OTHER_LATENTS)], dim=1) if OTHER_LATENTS in given else noisy
        if TEXT_MASK in given:
            counted = given[TEXT_MASK].bool()
            # Attention of which every key is masked returns NaN: an example without text attends to all its tokens.
            given[TEXT_MASK] = counted | ~counted.any(dim=1, keepdim=True)
        times = timestep * self._row.steps if timestep.is_floating_point() else timestep
        return self._row.call(self.network, latents, times, given)[:, : noisy.shape[1]]

    def refuse_padding(self, batch: Mapping[str, Tensor]) -> None:
        """Raises ValueError where a text in the batch begins or ends with zeros, and the mask that it needs is missing.

        No encoder of text makes zeros: they pad texts of different lengths, and would count as text. An example that is
        all zeros has no text. Call it for batches on the CPU: the host would wait for other devices.
        """
        text = batch.get(TEXT)
        if text is None or TEXT_MASK in batch or not self.optional_conditions:
            return
        if (text[:, 0].any(dim=1) != text[:, -1].any(dim=1)).any():
            raise ValueError(
                f"{TEXT} is padded with zeros in some examples, which would count as text: give {TEXT_MASK} too, bool"
                " [B, tokens], True where a token counts"
            )

    def tokens(self, shape: Sequence[int]) -> int | None:
        """Returns the number of patches in latents of `shape`, [C, ...]; None where the model does not make patches."""
        side = self.network.config.get("patch_size")
        patch = self._row.patch or (side and (side, side))
        return prod(shape[1:]) // prod(patch) if patch else None

    def _check(self, noisy: Tensor, timestep: Tensor, condition: Mapping[str, Tensor]) -> None:
        name = type(self.network).__name__
        if missing := [key for key in self.condition_shapes if key not in condition]:
            raise ValueError(f"{name} needs {', '.join(missing)}: choose a dataset with them")
        known = {*self.condition_shapes, *self.optional_conditions}
        if unknown := [key for key in condition if key not in known]:
            takes = ", ".join(sorted(known)) or "no condition"
            raise ValueError(f"{name} cannot use {', '.join(unknown)}; it takes {takes}")
        if noisy.shape[1] != self._channels:
            raise ValueError(f"{name} takes {self._channels} channels, not {noisy.shape[1]}: choose fitting images")
        if not (self.takes_steps or timestep.is_floating_point()):
            raise ValueError(f"{name} takes times from 0 to 1, and no whole steps")
        if (other := condition.get(OTHER_LATENTS)) is not None and other.shape[2:] != noisy.shape[2:]:
            raise ValueError(
                f"{OTHER_LATENTS} has the shape {list(other.shape[1:])}: its sizes after the channels must be those of"
                f" the latents, {list(noisy.shape[2:])}"
            )
        if (mask := condition.get(TEXT_MASK)) is not None and mask.shape != (shape := condition[TEXT].shape[:2]):
            raise ValueError(
                f"{TEXT_MASK} has the shape {list(mask.shape)}: it must be {list(shape)}, one for each token of {TEXT}"
            )


def build_diffusion(source: str | Path, overrides: Mapping[str, Any] | None = None) -> DiffusionModel:
    """Builds a model without pretrained weights, on the current default device (`with torch.device("meta")`).

    Args:
        source: a class in `CLASSES` ("UNet2DModel"), a name in `SHAPES` ("dit_xl"), or a folder: of a model, with the
            config.json of such a class, or of a pipeline, with such a model in its folder `transformer` or `unet`.
        overrides: values for keys of the model's configuration.

    Raises ValueError in one line if the source is unknown, or its class is trained through its pipeline; and as
    `build_network` does.
    """
    folder = None
    if source in SHAPES:
        name, config = SHAPES[source]
    elif str(source).isidentifier() and not Path(source).exists():
        name, config = str(source), {}
    elif (folder := config_folder(Path(source).expanduser())) is not None:
        name, config = read_config(folder)
    else:
        raise ValueError(
            f"{source}: no folder with a {CONFIG_FILE}: give one, one of {', '.join(SHAPES)}, or a class of diffusers:"
            f" {', '.join(CLASSES)}"
        )
    if name not in CLASSES:
        raise ValueError(_through_its_pipeline(name, Path(source).expanduser(), folder))
    row = CLASSES[name]
    return build_network(name, config, overrides, lambda network: DiffusionModel(network, row), row.check)


def _through_its_pipeline(name: str, source: Path, folder: Path | None) -> str:
    """Returns the error message for the class `name`, which is not in CLASSES.

    `folder` is where its config.json was found, None if `source` is the name of the class.
    """
    diffusers, parent = library(), source.absolute().parent
    given = "model.source=FOLDER (of a whole pipeline)"
    others = f"classes without a pipeline: {', '.join(CLASSES)}"
    with without_remarks():
        module = getattr(getattr(diffusers, name, None), "__module__", "")
    if not module.startswith(("diffusers.models.transformers.", "diffusers.models.unets.")):
        return f"{name} is not among the transformers and UNets of diffusers {diffusers.__version__}; {others}"
    if folder not in (None, source):
        given = "with the same model.source"
    elif folder is not None:
        whole = (parent / PIPELINE_FILE).is_file()
        given = f"model.source={parent}" if whole else f"{given} model.weights={source}"
    return (
        f"{name} is trained through its pipeline: take model=pipeline {given} dataset=captioned dataset.folder=DIR;"
        f" {others}"
    )
