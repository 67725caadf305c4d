"""Small models of all classes of diffusers that can be called, and inputs for them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from models.diffusion import DiffusionModel, build_diffusion
from tests.models.helpers.small_images import IMAGES
from tests.models.helpers.small_packed_images import PACKED_IMAGES
from tests.models.helpers.small_sounds import SOUNDS
from tests.models.helpers.small_videos import VIDEOS

TIMES = torch.tensor([0.25, 0.75])
# By name: the class, its configuration, and the shape of its latents.
SMALL = IMAGES | PACKED_IMAGES | VIDEOS | SOUNDS


def small(name: str, **changes: object) -> DiffusionModel:
    """The model of a small configuration, in eval(), with the same weights each time, none of them all zeros."""
    torch.manual_seed(0)
    kind, options, _ = SMALL[name]
    model = build_diffusion(kind, {**options, **changes}).eval()
    for key, parameter in model.named_parameters():
        # A modulation of zeros would hide what reaches it; diffusers gives experts no values.
        if parameter.ndim > 1 and (".experts." in key or not parameter.any()):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@cache
def shapes_of(name: str) -> dict[str, tuple[int | None, ...]]:
    kind, options, _ = SMALL[name]
    with torch.device("meta"):
        return build_diffusion(kind, options).condition_shapes


def inputs_of(name: str, tokens: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    """Random inputs for `small(name)`, with few tokens in each text."""
    generator = torch.Generator().manual_seed(1)
    condition = {}
    for key, shape in shapes_of(name).items():
        if key == "labels":
            condition[key] = torch.tensor([0, 2])
            continue
        if None in shape:
            # Latents beside the noisy ones.
            condition[key] = torch.randn(2, shape[0], *SMALL[name][2][1:], generator=generator)
            continue
        # A text is [tokens, width], of all layers [layers, tokens, width]; one state has no tokens.
        few = tuple(min(size, tokens) for size in shape[:-1])
        condition[key] = torch.randn(2, *few, shape[-1], generator=generator)
    return torch.randn(2, *SMALL[name][2], generator=generator), condition
