"""Latents come back from each layout as they went in."""

from __future__ import annotations

import pytest
import torch

from models.diffusion_layouts import CHANNELS_LAST, FRAMES_FIRST, LastPatches, Patches, PatchesInTraining, Separate


@pytest.mark.parametrize(
    ("layout", "shape", "packed"),
    [
        (Patches((2, 2)), (3, 4, 6), (2, 6, 12)),
        (Patches((1, 1, 1)), (3, 2, 4, 6), (2, 48, 3)),
        (Patches((1, 2, 2)), (3, 2, 4, 6), (2, 12, 12)),
        (FRAMES_FIRST, (3, 2, 4, 6), (2, 2, 3, 4, 6)),
        (CHANNELS_LAST, (3, 2, 4, 6), (2, 2, 4, 6, 3)),
    ],
)
def test_layouts_come_back_as_they_were(layout, shape: tuple[int, ...], packed: tuple[int, ...]) -> None:
    noisy = torch.randn(2, *shape)
    assert layout.packed(noisy).shape == packed
    assert torch.equal(layout.unpacked(layout.packed(noisy), noisy), noisy)


def test_each_image_is_a_video_of_one_frame() -> None:
    noisy = torch.randn(2, 3, 4, 6)
    packed = Separate().packed(noisy)
    assert [video.shape for video in packed] == [(3, 1, 4, 6)] * 2
    assert torch.equal(Separate().unpacked(packed, noisy), noisy)


def test_patches_of_a_model_in_training_are_put_together() -> None:
    noisy = torch.randn(2, 3, 4, 6)
    rows = noisy.view(2, 3, 2, 2, 3, 2).transpose(3, 4).reshape(2, 3, 6, 4)
    assert torch.equal(PatchesInTraining().unpacked(rows, noisy), noisy)
    assert PatchesInTraining().unpacked(noisy, noisy) is noisy


def test_sizes_that_are_no_multiple_of_a_patch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"multiples of a patch \[2, 2\], not \[4, 5\]"):
        Patches((2, 2)).packed(torch.zeros(1, 1, 4, 5))


def test_what_a_model_makes_of_other_tokens_is_left_out() -> None:
    noisy, layout = torch.randn(2, 3, 4, 6), LastPatches((2, 2))
    of_text = torch.randn(2, 5, 12)
    assert torch.equal(layout.unpacked(torch.cat([of_text, layout.packed(noisy)], dim=1), noisy), noisy)
