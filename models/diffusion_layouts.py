"""Layouts of latents in the inputs and outputs of diffusion models: as they are, patches, channels last, one by one."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt, prod

import torch
from torch import Tensor


class Layout:
    """Latents as they are."""

    def check(self, in_channels: int) -> None:
        """Raises ValueError where inputs of that many channels cannot be made of latents."""
        return

    def channels(self, in_channels: int) -> int:
        """Returns the channels of latents, of which the model's input has `in_channels`."""
        return in_channels

    def packed(self, noisy: Tensor) -> Tensor:
        """Returns latents [B, C, ...] as the model takes them."""
        return noisy

    def unpacked(self, output: Tensor, noisy: Tensor) -> Tensor:
        """Returns the model's output in the layout of `noisy`."""
        return output


class Moved(Layout):
    """Latents whose channels come after `before` other dimensions, such as frames."""

    def __init__(self, before: int):
        self._to = before + 1

    def packed(self, noisy: Tensor) -> Tensor:
        return noisy.movedim(1, self._to)

    def unpacked(self, output: Tensor, noisy: Tensor) -> Tensor:
        return output.movedim(self._to, 1)


@dataclass(frozen=True)
class Patches(Layout):
    """Latents as a sequence [B, patches, channels of a patch], in the order of rows; a patch has `sides` latents."""

    sides: tuple[int, ...]

    def check(self, in_channels: int) -> None:
        if in_channels % prod(self.sides):
            raise ValueError(f"in_channels={in_channels}: must be a multiple of {prod(self.sides)}, one patch")

    def channels(self, in_channels: int) -> int:
        return in_channels // prod(self.sides)

    def packed(self, noisy: Tensor) -> Tensor:
        counts, dims = self._counts(noisy), len(self.sides)
        split = [size for pair in zip(counts, self.sides, strict=True) for size in pair]
        patches = noisy.reshape(*noisy.shape[:2], *split)
        order = [*range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2)]
        return patches.permute(0, *order).reshape(len(noisy), prod(counts), -1)

    def unpacked(self, output: Tensor, noisy: Tensor) -> Tensor:
        counts, dims = self._counts(noisy), len(self.sides)
        patches = output.reshape(len(noisy), *counts, noisy.shape[1], *self.sides)
        pairs = [dim for number in range(dims) for dim in (1 + number, 2 + dims + number)]
        return patches.permute(0, 1 + dims, *pairs).reshape(noisy.shape)

    def _counts(self, noisy: Tensor) -> list[int]:
        if any(size % side for size, side in zip(noisy.shape[2:], self.sides, strict=True)):
            sizes, sides = list(noisy.shape[2:]), list(self.sides)
            raise ValueError(f"sizes of latents must be multiples of a patch {sides}, not {sizes}")
        return [size // side for size, side in zip(noisy.shape[2:], self.sides, strict=True)]


class LastPatches(Patches):
    """Patches of a model that returns what it makes of other tokens before them."""

    def unpacked(self, output: Tensor, noisy: Tensor) -> Tensor:
        return super().unpacked(output[:, -self.packed(noisy).shape[1] :], noisy)


class Separate(Layout):
    """Images as a list of videos of one frame, one for each example."""

    def packed(self, noisy: Tensor) -> list[Tensor]:
        return list(noisy.unsqueeze(2).unbind())

    def unpacked(self, output: list[Tensor], noisy: Tensor) -> Tensor:
        return torch.stack(list(output)).squeeze(2)


class PatchesInTraining(Layout):
    """Images that come back as [B, C, patches, latents of a patch] of a model in training."""

    def unpacked(self, output: Tensor, noisy: Tensor) -> Tensor:
        if output.shape == noisy.shape:
            return output
        batch, channels, height, width = noisy.shape
        side = isqrt(output.shape[-1])
        patches = output.view(batch, channels, height // side, width // side, side, side)
        return patches.transpose(3, 4).reshape(noisy.shape)


AS_THEY_ARE = Layout()
FRAMES_FIRST, CHANNELS_LAST, LENGTH_FIRST = Moved(1), Moved(3), Moved(1)
