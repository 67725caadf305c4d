"""Diffusion models of the library diffusers, all called as `model(noisy, timestep, **condition) -> velocity`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from models.built_again import fill_buffers
from models.diffusion_families import FAMILIES, reason_against
from models.diffusion_family import Family
from models.diffusion_files import CONFIG_FILE, config_folder, file_of
from models.diffusion_initialise import initialise_diffusion
from models.json_files import as_json, read_object
from models.library_dtypes import default_dtype, keep_float32, kept_by_diffusers
from models.packed_attention import avoid_cudnn_attention
from models.quiet_imports import import_quantisers, without_remarks
from models.safetensors_files import StoredTensor
from models.weights import load_weights, matched_weights

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


class DiffusionModel(nn.Module):
    """A model of diffusers with the inputs and outputs of flow matching; see `models.diffusion_family`.

    Attributes:
        network: the model itself, whose names of parameters are those of its files.
        condition_shapes: the shape of one example of each condition that the model needs, by name: () for `labels`,
            which are int64; all others are floating point.
        optional_conditions: the names of further conditions that it takes, the masks of its texts.
        sample_shape: the shape of one image, [C, H, W]; None where the model takes any size.
        num_labels: the labels that have an embedding, that for no label included; None for a model without labels.
        takes_steps: whether `timestep` may be whole numbers of steps.
    """

    # The masks of texts that the model takes, and the condition that has the text of each.
    _text_masks: Mapping[str, str] = MappingProxyType({})

    def __init__(self, network: nn.Module, family: Family):
        super().__init__()
        self.network = network
        self._family = family
        self.condition_shapes = family.condition_shapes(network.config)
        self._text_masks = family.text_masks(network.config)
        self.optional_conditions = tuple(self._text_masks)
        self.sample_shape = family.sample_shape(network.config)
        self.num_labels = family.num_labels(network.config)
        self.takes_steps = family.takes_steps(network.config)
        family.adapt(network)

    def forward(self, noisy: Tensor, timestep: Tensor, **condition: Tensor) -> Tensor:
        """Predicts the velocity from image to noise; with whole steps what its training made it predict, as noise.

        Args:
            noisy: [B, C, H, W], or [B, C, frames, H, W] of a video; converted to the model's dtype.
            timestep: float32 [B], from 0 (image) to 1 (noise); or int64 [B], steps from 0 (image) to 999 (noise).
            condition: `labels`, int64 [B], and embeddings, as in `condition_shapes`; and masks of texts, bool
                [B, tokens], True where a token counts. All tokens count where a mask is left out.

        Returns:
            The prediction, of the shape of `noisy`, in the model's dtype. A second half of the model's channels, a
            variance, is left out.

        Raises ValueError if a condition is missing or unknown, the images have a shape that the model does not take, or
        it takes no whole steps.
        """
        self._check(noisy, condition)
        if not (self.takes_steps or timestep.is_floating_point()):
            raise ValueError(f"{type(self.network).__name__} takes times from 0 to 1, and no whole steps")
        # Not that of the first parameter, which may be one that its class keeps in float32.
        dtype = self.network.dtype
        inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in condition.items()}
        return self._family.velocity(self.network, noisy.to(dtype), timestep, inputs)

    def refuse_padding(self, batch: Mapping[str, Tensor]) -> None:
        """Raises ValueError where a text in the batch begins or ends with zeros, and the mask that it needs is missing.

        No encoder of text makes zeros: they pad texts of different lengths, and would count as text. An example that is
        all zeros has no text. Call it for batches on the CPU: the host would wait for other devices.
        """
        for mask, name in self._text_masks.items():
            text = batch.get(name)
            if mask in batch or text is None:
                continue
            first, last = (text.select(-2, place).flatten(1).any(dim=1) for place in (0, -1))
            if (first != last).any():
                raise ValueError(
                    f"{name} is padded with zeros in some examples, which would count as text: give {mask} too, bool"
                    " [B, tokens], True where a token counts"
                )

    def tokens(self, shape: Sequence[int]) -> int | None:
        """Returns the patches of latents of `shape`, [C, ...]; None where the model is not known to make any."""
        return self._family.tokens(self.network.config, shape)

    def fill_buffers(self) -> None:
        """Fills the buffers, after construction on the meta device, as construction on the CPU does. Raises ValueError.

        Buffers with random numbers are refused. Weights are not touched. As in `from_pretrained`, tables outside the
        state dict are computed in the model's dtype; those inside are rounded to it, as those of files are.
        """
        fill_buffers(self.network, partial(self._same_again, self.network.dtype), self._same_again)

    def initialise(self, seed: int, device: torch.device | None = None) -> None:
        """See `models.diffusion_initialise.initialise_diffusion`."""
        initialise_diffusion(self.network, self._same_again, self._family.first_stds, seed, device)

    def load(self, path: Path) -> None:
        """Copies weights into the parameters and persistent buffers, as `models.weights.load_weights`.

        `path` is a .safetensors file, an index, the folder of a model, or that of a pipeline.
        """
        load_weights(self.network, file_of(path))

    def matched(self, path: Path) -> tuple[dict[str, Tensor], dict[str, StoredTensor]]:
        """Returns what `models.weights.matched_weights` returns of the files that `load` reads."""
        return matched_weights(self.network, file_of(path))

    def _same_again(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        with default_dtype(dtype):
            return type(self.network).from_config(self.network.config)

    def _check(self, noisy: Tensor, condition: Mapping[str, Tensor]) -> None:
        name = type(self.network).__name__
        missing = [key for key in self.condition_shapes if key not in condition]
        if missing:
            raise ValueError(f"{name} needs {', '.join(missing)}: choose a dataset with them")
        known = {*self.condition_shapes, *self.optional_conditions}
        unknown = [key for key in condition if key not in known]
        if unknown:
            takes = ", ".join(sorted(known)) or "no condition"
            raise ValueError(f"{name} cannot use {', '.join(unknown)}; it takes {takes}")
        channels = self._family.channels(self.network.config)
        if noisy.shape[1] != channels:
            raise ValueError(f"{name} takes {channels} channels, not {noisy.shape[1]}: choose fitting images")


def build_diffusion(source: str | Path, overrides: Mapping[str, Any] | None = None) -> DiffusionModel:
    """Builds a model without pretrained weights, on the current default device (`with torch.device("meta")`).

    Args:
        source: a class of diffusers ("UNet2DModel"), a name in `SHAPES` ("dit_xl"), or a folder with a config.json, of
            a model or with the folder `transformer` or `unet` of a pipeline.
        overrides: values for keys of the model's configuration.

    Raises:
        ValueError: one line about a source that is unknown, a key that the class does not have, with the closest names,
            or a value that it does not take.
    """
    name, _ = _described(source)
    family = FAMILIES.get(name)
    if family is None and (reason := reason_against(name)):
        raise ValueError(f"{source}: {name} is not supported: {reason}")
    if family is None:
        raise ValueError(f"{source}: {name} is not supported; classes of diffusers that are: {', '.join(FAMILIES)}")
    return build_network(source, overrides, lambda network: DiffusionModel(network, family), family.check)


def build_network(
    source: str | Path,
    overrides: Mapping[str, Any] | None,
    wrapped: Callable[[nn.Module], DiffusionModel],
    check: Callable[[Mapping[str, Any]], None] = lambda config: None,
) -> DiffusionModel:
    """Builds a class of diffusers as `build_diffusion` does, whichever it is, and returns it `wrapped`.

    `check` may raise ValueError for its configuration.
    """
    avoid_cudnn_attention()
    name, config = _described(source)
    import_quantisers()
    with without_remarks():
        import diffusers

        # Its modules are imported by this.
        made = getattr(diffusers, name)
    keys = dict(inspect.signature(made.__init__).parameters)
    del keys["self"]
    for key in config:
        if key not in keys and config[key] not in (None, False):
            raise ValueError(
                f"{source}: {CONFIG_FILE} has {key}={config[key]}, which {name} of diffusers {diffusers.__version__}"
                " does not know: install a fitting version"
            )
    overrides = as_json(overrides or {})
    for key in overrides:
        if key not in keys:
            close = get_close_matches(key, keys, n=3)
            meant = f" Did you mean {' or '.join(close)}?" if close else ""
            raise ValueError(f"{key}={overrides[key]}: {name} has no such key.{meant} It has {', '.join(keys)}")
    values = {key: value for key, value in config.items() if key in keys} | overrides
    defaults = {key: one.default for key, one in keys.items() if one.default is not one.empty}
    if (defaults | values).get("concat_padding_mask") and not diffusers.utils.is_torchvision_available():
        raise ValueError(
            f"{name} resizes its mask of padding (concat_padding_mask=true) with torchvision, which is not installed:"
            " pip install torchvision, of the release that fits your torch"
        )
    try:
        check(defaults | values)
        network = made(**values)
        keep_float32(network, kept_by_diffusers(made), torch.get_default_dtype())
        if empty := next((name for name, each in network.named_parameters() if not each.numel()), None):
            raise ValueError(f"{empty} would have the shape {list(network.get_parameter(empty).shape)}")
        return wrapped(network)
    # For values that do not fit, constructors raise errors of any type.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{name} cannot be built with {values}: {reason}") from error


def _described(source: str | Path) -> tuple[str, dict[str, Any]]:
    """Returns the name of a class and the configuration that `source` stands for."""
    if source in SHAPES:
        return SHAPES[source]
    if str(source).isidentifier() and not Path(source).exists():
        return str(source), {}
    folder = config_folder(Path(source).expanduser())
    if folder is None:
        raise ValueError(
            f"{source}: no folder with a {CONFIG_FILE}: give one, one of {', '.join(SHAPES)}, or a class of diffusers:"
            f" {', '.join(FAMILIES)}"
        )
    file = folder / CONFIG_FILE
    config = read_object(file, "download it again")
    if not isinstance(config.get("_class_name"), str):
        raise ValueError(f"{file} names no class of diffusers: give the folder of a model that diffusers saved")
    return config["_class_name"], {key: value for key, value in config.items() if not key.startswith("_")}
