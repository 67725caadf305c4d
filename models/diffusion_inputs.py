"""The inputs of diffusion models that follow from others: masks, places of patches, sizes, times.

Each is what the pipeline of the model in diffusers makes. They are made on the device of the latents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEXT = "encoder_hidden_states"
# The usual name of the mask of a text, bool [B, tokens]; also of masks that a class takes in another form.
TEXT_MASK = "encoder_attention_mask"
# Pixels of a side for each latent of the usual autoencoders.
PIXELS = 8


@dataclass(frozen=True)
class Given:
    """The arguments of a model's call: latents [B, C, ...], times float32 [B] from 0 to 1, and conditions by name."""

    network: nn.Module
    noisy: Tensor
    timestep: Tensor
    condition: Mapping[str, Tensor]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.network.config

    @property
    def tokens(self) -> int:
        """The tokens of the text, [B, tokens, width] or of several layers [B, layers, tokens, width]."""
        return self.condition[TEXT].shape[-2]

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the latents."""
        return tuple(self.noisy.shape[-2:])

    def grid(self, patch: int) -> tuple[int, int]:
        """Rows and columns of patches of `patch` latents a side."""
        return tuple(side // patch for side in self.sides)


Made = Callable[[Given], dict[str, Any]]


def constant(**arguments: Any) -> Made:
    """Returns a function that returns these arguments as they are."""
    return lambda given: arguments


def length_of(argument: str) -> Made:
    """The number of tokens [B] that count in a text."""
    return lambda given: {argument: given.condition[TEXT_MASK].sum(dim=1)}


def number(argument: str, value: float, key: str | None = None) -> Made:
    """Returns a number for each example, [B], unless the caller gives it or `key` is null in the configuration."""

    def made(given: Given) -> dict[str, Any]:
        if argument in given.condition or (key is not None and given.config[key] is None):
            return {}
        return {argument: torch.full_like(given.timestep, value, dtype=torch.float32)}

    return made


def same_time(argument: str) -> Made:
    """Returns the time, 0 to 1 in the model's dtype, under a second name: steps of no length, so velocities."""
    return lambda given: {argument: given.timestep.to(given.noisy.dtype)}


def times_of_frames(given: Given) -> dict[str, Any]:
    """Returns the times of AnyFlow, [B, frames], 0 to 1000: where a step begins and, as for velocities, ends."""
    times = (given.timestep * 1000)[:, None].expand(-1, given.noisy.shape[2])
    return {"timestep": times, "r_timestep": times}


def exchanged(argument: str, one: int, other: int) -> Made:
    """Returns a condition with two of its dimensions exchanged."""
    return lambda given: {argument: given.condition[argument].transpose(one, other)}


def listed(argument: str, dim: int = 0) -> Made:
    """Returns a condition as a list of tensors: one for each example, or for each place in another dimension."""
    return lambda given: {argument: list(given.condition[argument].unbind(dim))}


def listed_text(argument: str) -> Made:
    """Returns a text as a list of the tokens that count, [tokens, width] for each example."""

    def made(given: Given) -> dict[str, Any]:
        text, mask = given.condition[argument], given.condition[TEXT_MASK]
        # How many tokens count is not known on the meta device.
        if mask is None or mask.is_meta:
            return {argument: list(text)}
        return {argument: [each[counted] for each, counted in zip(text, mask, strict=True)]}

    return made


def no_latents(argument: str) -> Made:
    """Returns zeros in the place of latents [B, length, C] that a sound would continue."""
    return lambda given: {argument: torch.zeros_like(given.noisy).transpose(1, 2)}


def guidance(scale: float, rounded: bool = False) -> Made:
    """Returns the scale of guidance [B] for models that have an embedding for it, as diffusers' own training gives it.

    `rounded`: in the dtype of the model, else float32.
    """

    def made(given: Given) -> dict[str, Any]:
        if not given.config["guidance_embeds"]:
            return {}
        dtype = given.noisy.dtype if rounded else torch.float32
        return {"guidance": torch.full_like(given.timestep, scale, dtype=dtype)}

    return made


def scaled_guidance(scale: float) -> Made:
    """Returns `guidance` times the scale of its embedding in the configuration."""
    return lambda given: guidance(scale * given.config["guidance_embeds_scale"])(given)


def places(
    axes: int = 3, row_axis: int = 1, text_axes: tuple[int, ...] = (), side: int = 2, scale: float = 1.0
) -> Made:
    """Places of patches of `side` latents a side, [patches, axes]: row and column in the axes from `row_axis` on.

    They are multiplied by `scale`, and 0 in the other axes. Those of the text count its tokens in `text_axes`.
    """

    def made(given: Given) -> dict[str, Any]:
        rows, columns = given.grid(side)
        device = given.noisy.device
        of_image = torch.zeros(rows, columns, axes, device=device)
        of_image[..., row_axis] += torch.arange(rows, device=device)[:, None]
        of_image[..., row_axis + 1] += torch.arange(columns, device=device)
        of_text = torch.zeros(given.tokens, axes, device=device)
        for axis in text_axes:
            of_text[:, axis] += torch.arange(given.tokens, device=device)
        return {"img_ids": of_image.view(-1, axes) * scale, "txt_ids": of_text}

    return made


def places_in_one(given: Given) -> dict[str, Any]:
    """Returns places of tokens of the text, which are 0, and after them of patches of 2 x 2 latents, of Krea 2."""
    made = places()(given)
    return {"position_ids": torch.cat([made["txt_ids"], made["img_ids"]])}


def places_after_text(given: Given) -> dict[str, Any]:
    """Places of LongCat-Image: the image is modality 1, and its rows and columns begin where 512 tokens would end."""
    made = places(text_axes=(1, 2))(given)
    offset = torch.zeros_like(made["img_ids"])
    offset[:, 0] += 1
    offset[:, 1:] += 512
    return made | {"img_ids": made["img_ids"] + offset}


def mask_of_text_and_patches(name: str, side: int) -> Made:
    """The mask `name` of a text with patches of `side` latents a side after it, which count: [B, tokens + patches]."""

    def made(given: Given) -> dict[str, Any]:
        return {name: F.pad(given.condition[name], (0, prod(given.grid(side))), value=True)}

    return made


def mask_of_bria(given: Given) -> dict[str, Any]:
    """Returns the mask of the text and single latents of Bria FIBO, [B, 1, 1, tokens + latents]."""
    if given.condition[TEXT_MASK] is None:
        return {}
    mask = mask_of_text_and_patches(TEXT_MASK, 1)(given)[TEXT_MASK]
    return {"joint_attention_kwargs": {"attention_mask": mask[:, None, None]}}


def patch_counts(given: Given) -> dict[str, Any]:
    """Returns frames, rows and columns of patches of 2 x 2 latents: for each example a list of one image."""
    return {"img_shapes": [[(1, *given.grid(2))]] * len(given.noisy)}


def image_after_text(given: Given) -> dict[str, Any]:
    """Returns rows and columns of latents of Qwen-Image 2.1, and where tokens of four each come after those of text.

    Raises ValueError where latents do not come in fours.
    """
    (rows, columns), device = given.sides, given.noisy.device
    if rows * columns % 4:
        raise ValueError(f"height times width of latents must be a multiple of 4, not {rows} x {columns}")
    mask = torch.zeros(len(given.noisy), given.tokens + rows * columns // 4, dtype=torch.bool, device=device)
    mask[:, given.tokens :] = True
    return {"img_shapes": [[(1, rows, columns)]] * len(given.noisy), "img_mask": mask}


def one_image(given: Given) -> dict[str, Any]:
    """Returns frames, rows and columns of patches of 2 x 2 latents, for each example, of Nucleus-Image."""
    return {"img_shapes": [(1, *given.grid(2))] * len(given.noisy)}


def video_sizes(given: Given) -> dict[str, Any]:
    """Frames, height and width of latents, and what one of them stands for in seconds and pixels of LTX-Video."""
    frames, height, width = given.noisy.shape[2:]
    # 25 frames a second; a latent stands for 8 frames of 32 x 32 pixels.
    scale = (8 / 25, 32, 32)
    return {"num_frames": frames, "height": height, "width": width, "rope_interpolation_scale": scale}


def _pixels(given: Given) -> Tensor:
    """Returns height and width of the image in pixels, [B, 2]."""
    sides = [given.noisy.new_full((len(given.noisy),), PIXELS * side) for side in given.sides]
    return torch.stack(sides, dim=1)


def resolution(given: Given) -> dict[str, Any]:
    """Returns height and width in pixels [B, 2], and their ratio [B, 1], of PixArt-alpha."""
    pixels = _pixels(given)
    return {"added_cond_kwargs": {"resolution": pixels, "aspect_ratio": pixels[:, :1] / pixels[:, 1:]}}


def sizes_of_image(given: Given) -> dict[str, Any]:
    """Returns height and width in pixels of an image that was neither scaled nor cropped, of CogView."""
    pixels = _pixels(given)
    return {"original_size": pixels, "target_size": pixels, "crop_coords": torch.zeros_like(pixels)}


def style_and_sizes(given: Given) -> dict[str, Any]:
    """Returns the style of photographs, and the sizes of an image that was not cropped, of Hunyuan-DiT."""
    if not given.config["use_style_cond_and_image_meta_size"]:
        return {}
    pixels = _pixels(given)
    return {
        "style": torch.zeros(len(given.noisy), dtype=torch.int64, device=given.noisy.device),
        "image_meta_size": torch.cat([pixels, pixels, torch.zeros_like(pixels)], dim=1),
    }


def rotary_2d(given: Given) -> dict[str, Any]:
    """Returns rotary places of patches of Hunyuan-DiT, for which images of 512 pixels have the base size."""
    from diffusers.models.embeddings import get_2d_rotary_pos_embed

    network, patch = given.network, given.config["patch_size"]
    grid = given.grid(patch)
    crop = _crop(grid, 512 // PIXELS // patch, 512 // PIXELS // patch)
    width = network.inner_dim // network.num_heads
    return {"image_rotary_emb": get_2d_rotary_pos_embed(width, crop, grid, device=given.noisy.device, output_type="pt")}


def rotary_of_videos(given: Given) -> dict[str, Any]:
    """Rotary places of patches of CogVideoX: of its first version without, of 1.5 with patches of several frames."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    config, frames = given.config, given.noisy.shape[2]
    if not config["use_rotary_positional_embeddings"]:
        return {}
    patch, patch_t = config["patch_size"], config.get("patch_size_t")
    grid = given.grid(patch)
    base = config["sample_height"] // patch, config["sample_width"] // patch
    options = {
        "crops_coords": None if patch_t else _crop(grid, *base),
        "temporal_size": -(-frames // patch_t) if patch_t else frames,
        **({"grid_type": "slice", "max_size": base} if patch_t else {}),
    }
    width = config["attention_head_dim"]
    return {"image_rotary_emb": get_3d_rotary_pos_embed(width, grid_size=grid, device=given.noisy.device, **options)}


def rotary_of_allegro(given: Given) -> dict[str, Any]:
    """Returns rotary places of patches of Allegro, by frame, row and column."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    config, grid = given.config, given.grid(given.config["patch_size"])
    made = get_3d_rotary_pos_embed_allegro(
        embed_dim=config["attention_head_dim"],
        crops_coords=((0, 0), grid),
        grid_size=grid,
        temporal_size=given.noisy.shape[2] // config["patch_size_t"],
        interpolation_scale=tuple(config[f"interpolation_scale_{axis}"] for axis in "thw"),
        device=given.noisy.device,
    )
    each = torch.cartesian_prod(*(axis.to(torch.long) for axis in made[3:]))
    by_axis = each.T.reshape(3, 1, -1).contiguous()
    return {"image_rotary_emb": (made[:3], tuple(by_axis))}


def rotary_of_lumina(given: Given) -> dict[str, Any]:
    """Returns rotary places of Lumina-Next, for images of up to 384 patches a side."""
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    made = get_2d_rotary_pos_embed_lumina(given.network.head_dim, 384, 384, linear_factor=1.0, ntk_factor=1.0)
    return {"image_rotary_emb": made.to(given.noisy.device)}


def rotary_of_sounds(given: Given) -> dict[str, Any]:
    """Returns rotary places along a sound, after the global states, of Stable Audio."""
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    length = given.noisy.shape[2] + given.condition["global_hidden_states"].shape[1]
    at = torch.arange(length, device=given.noisy.device)
    width = given.config["attention_head_dim"] // 2
    return {"rotary_embedding": get_1d_rotary_pos_embed(width, at, use_real=True, repeat_interleave_real=False)}


def places_of_kandinsky(given: Given) -> dict[str, Any]:
    """Places of Kandinsky 5: frames, rows and columns of patches, and tokens of the text."""
    device = given.noisy.device
    counts = (size // side for size, side in zip(given.noisy.shape[2:], given.config["patch_size"], strict=True))
    return {
        "visual_rope_pos": [torch.arange(count, device=device) for count in counts],
        "text_rope_pos": torch.arange(given.tokens, device=device),
    }


def padding(given: Given) -> dict[str, Any]:
    """Returns the mask of padding of Cosmos, [1, 1, H, W]: none."""
    return {"padding_mask": given.noisy.new_zeros(1, 1, *given.sides)}


def text_for_each_frame(given: Given) -> dict[str, Any]:
    """Returns the text of a video once for each frame, [B * frames, tokens, width]."""
    return {TEXT: given.condition[TEXT].repeat_interleave(given.noisy.shape[2], dim=0)}


def mask_for_each_frame(given: Given) -> dict[str, Any]:
    """Returns the mask of the text of a video once for each frame, [B * frames, tokens], of Latte."""
    mask = given.condition[TEXT_MASK]
    return {} if mask is None else {TEXT_MASK: mask.repeat_interleave(given.noisy.shape[2], dim=0)}


def _crop(grid: tuple[int, int], base_height: int, base_width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the first and the last place of a grid that is scaled into the base size, centred."""
    rows, columns = grid
    if rows / columns > base_height / base_width:
        height, width = base_height, round(base_height / rows * columns)
    else:
        height, width = round(base_width / columns * rows), base_width
    top, left = round((base_height - height) / 2), round((base_width - width) / 2)
    return (top, left), (top + height, left + width)
