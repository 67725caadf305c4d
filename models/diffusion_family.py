"""The families of diffusion models: what a class of diffusers is called with, in one uniform call.

The uniform call is `velocity(network, noisy, timestep, condition)`: noisy and velocity [B, C, H, W] (videos
[B, C, frames, H, W], sounds [B, C, length], embeddings [B, C]), timestep float32 [B] from 0 (image) to 1 (noise),
condition by name. A model that was trained to predict noise, v or images is called with int64 steps instead, and
returns what it predicts. `Called` is the general rule: a class is called as its row in `models.diffusion_families`
says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models.diffusion_inputs import TEXT, TEXT_MASK, Given
from models.diffusion_layouts import AS_THEY_ARE, Layout, Patches

Shape = tuple[int | None, ...]
Config = Mapping[str, Any]
# A number, the key of the configuration that has it ("caption_channels", or of a list "caption_channels.0"), several
# keys of which the first that is not null counts ("caption_channels|cross_attention_dim"), or what computes it.
Size = int | str | Callable[[Config], int]
# Most models were trained on the numbers of 1000 steps.
STEPS = 1000
# The condition with the further channels of a model that takes more than it returns, [B, C', ...]: latents of an image
# of image-to-video, a mask and the masked image of inpainting.
OTHER_LATENTS = "other_latents"
# The text of a mask, where a class takes one mask.
TEXT_MASKS = {TEXT_MASK: TEXT}
SQUARE: tuple[Size, ...] = ("sample_size", "sample_size")
# PixArt-alpha (Chen et al. 2023), with the modulation of adaLN-single.
ADALN_SINGLE = {
    "*.timestep_embedder.linear_[12]": 0.02,
    "caption_projection.linear_[12]": 0.02,
    "*.attn2.to_out.0": 0.0,
    "proj_out": 0.0,
}


class Family(ABC):
    """The inputs of the models of one class of diffusers. `config` is the configuration of a model."""

    masks: Mapping[str, str] = {}
    """conditions that may be left out: masks of texts, [B, tokens], by name; the condition that has the text of each"""
    first_stds: ClassVar[Mapping[str, float]] = {}
    """how layers begin that do not begin as torch makes them: the standard deviation of their weights, 0 for zeros, by
    patterns over their names"""

    def check(self, config: Config) -> None:
        """Raises ValueError naming a key and its value, where a model of that configuration needs inputs not known."""
        require(config, in_channels=config["out_channels"] or config["in_channels"])

    def condition_shapes(self, config: Config) -> dict[str, Shape]:
        """Returns the shape of one example of each condition that the model needs; that of a label is ().

        That of latents beside the noisy ones has None for each size that they share.
        """
        return {}

    def text_masks(self, config: Config) -> dict[str, str]:
        """Returns the `masks` of those texts that the model takes."""
        shapes = self.condition_shapes(config)
        return {mask: text for mask, text in self.masks.items() if text in shapes}

    def num_labels(self, config: Config) -> int | None:
        """Returns the number of labels that have an embedding, that for no label included. None: no labels."""
        return None

    def sample_shape(self, config: Config) -> Shape | None:
        """Returns the shape of one image, [C, H, W]; None where the model takes any size."""
        return square(config["in_channels"], config.get("sample_size"))

    def channels(self, config: Config) -> int:
        """Returns the channels of `noisy`."""
        return config["in_channels"]

    def takes_steps(self, config: Config) -> bool:
        """Tells whether the model can be called with whole numbers of steps, from 0 (image) to 999 (noise)."""
        return True

    def tokens(self, config: Config, shape: Sequence[int]) -> int | None:
        """Returns the patches of latents of `shape`, [C, ...]; None where the model is not known to make any."""
        patch = config.get("patch_size")
        if patch is None:
            return None
        sides = (config.get("patch_size_t") or 1, patch, patch) if isinstance(patch, int) else patch
        return prod(shape[1:]) // prod(sides)

    def adapt(self, network: nn.Module) -> None:
        """Changes the new model: where it draws random numbers that the loop draws, say."""
        return

    @abstractmethod
    def velocity(self, network: nn.Module, noisy: Tensor, timestep: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Calls the model. `noisy` has its dtype, and so have the floating-point tensors of `condition`."""


@dataclass(frozen=True)
class Called(Family):
    """A class whose call is described by values: the conditions with their sizes, and the inputs that follow from them.

    Attributes:
        sizes: for each condition, which has the name of an argument of the model's forward, the sizes of one example. A
            condition of which a size is null in the configuration is not taken.
        inputs: functions that return further arguments of the call: places of patches, sizes of the image.
        layout: how latents lie in the model's input and output.
        latents, time: the arguments that take them.
        steps: the model's number for time 1, or the function that has it; 1 where times are from 0 to 1.
        rounded: times have the model's dtype, from which some take that of their embeddings; else float32.
        from_noise: times count from noise (0) to image.
        to_image: the model predicts the velocity from noise to image.
        in_channels, out_channels: of one input of the model, as sizes. A null out_channels is in_channels.
        variance: the model may have twice the channels out, of which the second half, a variance, is left out, as SiT
            does (Ma et al. 2024).
        sample: the sizes of one image after its channels; () where the model takes any.
        one_size: the model takes latents of these sizes only.
        beside: the dimensions of latents after their channels, where a model may take more channels than it returns:
            the further ones are the condition `other_latents`. 0: it may not. Also those of `separate`.
        separate: conditions that are latents of their own, with the sizes of the noisy ones: the channels of each.
        needs_masks: where a mask is left out, the class gets one by which all tokens count; else None.
        passes_masks: masks are arguments of the class's forward; else `inputs` make something else of them.
        required: the values of keys without which a model needs inputs that are not known here.
    """

    sizes: Mapping[str, tuple[Size, ...]] = field(default_factory=dict)
    inputs: tuple[Callable[[Given], dict[str, Any]], ...] = ()
    layout: Layout = AS_THEY_ARE
    latents: str = "hidden_states"
    time: str = "timestep"
    steps: Size = STEPS
    rounded: bool = False
    from_noise: bool = False
    to_image: bool = False
    in_channels: Size = "in_channels"
    out_channels: Size = "out_channels"
    variance: bool = False
    sample: tuple[Size, ...] = ()
    one_size: bool = False
    beside: int = 0
    separate: Mapping[str, Size] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    masks: Mapping[str, str] = field(default_factory=dict)
    needs_masks: bool = False
    passes_masks: bool = True
    first_stds: Mapping[str, float] = field(default_factory=dict)

    def check(self, config: Config) -> None:
        require(config, **self.required)
        taken = size_of(config, self.in_channels)
        made = size_of(config, self.out_channels)
        if self.beside and made is not None and made < taken:
            self.layout.check(made)
        elif made not in (None, taken) and not (self.variance and made == 2 * taken):
            raise ValueError(
                f"{_name_of(self.out_channels)}={made}: the model must return as many channels as it takes, {taken}"
            )
        self.layout.check(taken)

    def condition_shapes(self, config: Config) -> dict[str, Shape]:
        shapes = {name: tuple(size_of(config, size) for size in sizes) for name, sizes in self.sizes.items()}
        needed = {name: shape for name, shape in shapes.items() if None not in shape}
        of_both = self.layout.channels(size_of(config, self.in_channels))
        if further := of_both - self.channels(config):
            needed[OTHER_LATENTS] = (further, *[None] * self.beside)
        for name, channels in self.separate.items():
            needed[name] = (size_of(config, channels), *[None] * self.beside)
        return needed

    def sample_shape(self, config: Config) -> Shape | None:
        shape = tuple(size_of(config, size) for size in self.sample)
        return None if not shape or None in shape else (self.channels(config), *shape)

    def channels(self, config: Config) -> int:
        taken = size_of(config, self.in_channels)
        made = size_of(config, self.out_channels) if self.beside else None
        return self.layout.channels(taken if made is None else made)

    def takes_steps(self, config: Config) -> bool:
        return size_of(config, self.steps) == STEPS and not self.from_noise and not self.to_image

    def tokens(self, config: Config, shape: Sequence[int]) -> int | None:
        if isinstance(self.layout, Patches):
            return prod(shape[1:]) // prod(self.layout.sides)
        return super().tokens(config, shape)

    def velocity(self, network: nn.Module, noisy: Tensor, timestep: Tensor, condition: dict[str, Tensor]) -> Tensor:
        config, shape = network.config, tuple(noisy.shape[1:])
        if self.one_size and shape != self.sample_shape(config):
            raise ValueError(f"the model takes images of shape {list(self.sample_shape(config))}, not {list(shape)}")
        latents, condition = joined(noisy, condition)
        condition |= self._masks_in(condition)
        given = Given(network, noisy, timestep, condition)
        time = steps_of(1 - timestep if self.from_noise else timestep, size_of(config, self.steps))
        arguments = {
            self.latents: self.layout.packed(latents),
            self.time: time.to(noisy.dtype) if self.rounded else time,
            **{name: value for name, value in condition.items() if self.passes_masks or name not in self.masks},
        }
        for made in self.inputs:
            arguments |= made(given)
        output = network(**arguments, return_dict=False)
        output = self.layout.unpacked(output[0] if isinstance(output, tuple) else output, noisy)
        if self.variance:
            output = output[:, : noisy.shape[1]]
        return -output if self.to_image else output

    def _masks_in(self, condition: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Returns the masks of the texts in `condition`, bool [B, tokens]. Raises ValueError for other shapes."""
        masks: dict[str, Tensor | None] = {}
        for name, of in self.masks.items():
            if of not in condition:
                continue
            text, given = condition[of], condition.get(name)
            shape = text.shape[0], text.shape[-2]
            if given is None:
                # Some classes have no default for it.
                masks[name] = text.new_ones(shape, dtype=torch.bool) if self.needs_masks else None
                continue
            if given.shape != shape:
                raise ValueError(
                    f"{name} has the shape {list(given.shape)}: it must be {list(shape)}, one for each token of {of}"
                )
            counted = given.bool()
            # A task that drops a text may fill its mask with zeros too, and attention to nothing is NaN.
            masks[name] = counted | ~counted.any(dim=1, keepdim=True)
        return masks


def steps_of(timestep: Tensor, steps: float = STEPS) -> Tensor:
    """Returns times from 0 to 1 as a model counts them, of which 1 is `steps`; int64 steps are so already."""
    return timestep * steps if timestep.is_floating_point() else timestep


def size_of(config: Config, size: Size) -> Any:
    """Returns the number that a `Size` stands for in a configuration; None where its keys are null or not there."""
    if callable(size):
        return size(config)
    if not isinstance(size, str):
        return size
    for name in size.split("|"):
        key, _, index = name.partition(".")
        value = config.get(key)
        if value is not None:
            return value[int(index)] if index else value
    return None


def joined(noisy: Tensor, condition: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns `noisy` with the channels of `other_latents` after its own, and the other conditions.

    Raises ValueError if they have other sizes than `noisy`.
    """
    other = condition.get(OTHER_LATENTS)
    if other is None:
        return noisy, condition
    if other.shape[2:] != noisy.shape[2:]:
        raise ValueError(
            f"{OTHER_LATENTS} has the shape {list(other.shape[1:])}: its sizes after the channels must be those of the"
            f" latents, {list(noisy.shape[2:])}"
        )
    rest = {name: value for name, value in condition.items() if name != OTHER_LATENTS}
    return torch.cat([noisy, other], dim=1), rest


def sizes_of_text(tokens: Size, width: Size) -> dict[str, tuple[Size, ...]]:
    """Returns the sizes of a text's embeddings, [tokens, width], under the name that most models have for them."""
    return {"encoder_hidden_states": (tokens, width)}


def sizes_of_texts(tokens: Size, width: Size) -> dict[str, tuple[Size, ...]]:
    """Returns those of a text, and of one embedding of a whole text."""
    return {**sizes_of_text(tokens, width), "pooled_projections": ("pooled_projection_dim",)}


def require(config: Config, **values: Any) -> None:
    """Raises ValueError naming the first key whose value in `config` is another than in `values`."""
    for key, value in values.items():
        if config[key] != value:
            raise ValueError(f"{key}={config[key]}: only {key}={value} is supported in this model")


def square(channels: int, size: int | list[int] | None) -> Shape | None:
    """Returns the shape [C, H, W] of images of one size, or of a pair of sizes; None without a size."""
    if size is None:
        return None
    return (channels, size, size) if isinstance(size, int) else (channels, *size)


def _name_of(size: Size) -> str:
    return size if isinstance(size, str) else "out_channels"
