"""Families with labels or several kinds of conditions, against their classes called by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.models.helpers.small_diffusion import SMALL, TIMES, inputs_of, small

STEPS = TIMES * 1000


def called(name: str) -> Tensor:
    noisy, condition = inputs_of(name)
    return small(name)(noisy, TIMES, **condition)


# What each class is called with by hand, beside its latents and times.
CALLS = {
    "unet": lambda given: {"class_labels": given["labels"]},
    "text_unet": lambda given: given,
    "sdxl": lambda given: {"encoder_hidden_states": given.pop("encoder_hidden_states"), "added_cond_kwargs": given},
    # An image in the place of a text.
    "kandinsky": lambda given: {"encoder_hidden_states": None, "added_cond_kwargs": given},
    "dit": lambda given: {"class_labels": given["labels"]},
    "upscaling_unet": lambda given: given,
    "inpainting_unet": lambda given: given,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_class_is_called_as_by_hand(name: str) -> None:
    noisy, condition = inputs_of(name)
    latents = torch.cat([noisy, condition.pop("other_latents")], dim=1) if "other_latents" in condition else noisy
    latents_name = "hidden_states" if name == "dit" else "sample"
    inputs = {latents_name: latents, "timestep": STEPS, **CALLS[name](condition)}
    expected = small(name).network(**inputs, return_dict=False)[0]
    # A variance is left out.
    assert torch.equal(called(name), expected[:, : noisy.shape[1]])


def test_dit_drops_no_labels_of_its_own() -> None:
    noisy, condition = inputs_of("dit")
    model = small("dit").train()
    assert all(torch.equal(model(noisy, TIMES, **condition), called("dit")) for _ in range(20))


def test_dit_with_a_variance_gives_the_mean_alone() -> None:
    model, (_, _, shape) = small("dit", out_channels=8), SMALL["dit"]
    assert model(torch.randn(1, *shape), TIMES[:1], labels=torch.tensor([1])).shape == (1, 4, 8, 8)


def test_dit_refuses_other_sizes() -> None:
    with pytest.raises(ValueError, match=r"takes images of shape \[4, 8, 8\], not \[4, 8, 4\]"):
        small("dit")(torch.zeros(1, 4, 8, 4), TIMES[:1], labels=torch.tensor([1]))
