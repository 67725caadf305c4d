"""What the inputs of diffusion models are made of; tests of the families compare all of them with the pipelines'."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from models.diffusion_inputs import (
    CHANNELS_LAST,
    FRAMES_FIRST,
    Given,
    Patches,
    PatchesInTraining,
    Separate,
    guidance,
    mask_of,
    places,
    resolution,
)

TIMES = torch.tensor([0.25, 0.75])


def given(noisy: torch.Tensor, config: dict | None = None, **condition: torch.Tensor) -> Given:
    return Given(SimpleNamespace(config=config or {}), noisy, TIMES, condition)


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


def test_a_mask_that_the_caller_gives_stays() -> None:
    text = torch.randn(2, 3, 6)
    made = mask_of("mask")
    assert made(given(torch.zeros(2, 1), encoder_hidden_states=text))["mask"].shape == (2, 3)
    assert made(given(torch.zeros(2, 1), encoder_hidden_states=text, mask=torch.zeros(2, 3))) == {}
    assert made(given(torch.zeros(2, 1))) == {}


def test_guidance_is_for_models_with_an_embedding_of_it() -> None:
    noisy = torch.zeros(2, 1).bfloat16()
    assert guidance(3.5)(given(noisy, {"guidance_embeds": False})) == {}
    made = guidance(3.5)(given(noisy, {"guidance_embeds": True}))["guidance"]
    assert (made.dtype, made.tolist()) == (torch.float32, [3.5, 3.5])
    assert guidance(3.5, rounded=True)(given(noisy, {"guidance_embeds": True}))["guidance"].dtype == torch.bfloat16


def test_places_count_rows_columns_and_tokens() -> None:
    made = places(axes=4, text_axes=(3,))(given(torch.zeros(2, 1, 4, 6), encoder_hidden_states=torch.zeros(2, 2, 1)))
    assert made["img_ids"].tolist() == [[0, row, column, 0] for row in range(2) for column in range(3)]
    assert made["txt_ids"].tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]


def test_the_resolution_is_in_pixels() -> None:
    made = resolution(given(torch.zeros(2, 1, 4, 8)))["added_cond_kwargs"]
    assert made["resolution"].tolist() == [[32, 64]] * 2
    assert made["aspect_ratio"].tolist() == [[0.5]] * 2
