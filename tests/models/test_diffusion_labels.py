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


def velocity_by_hand(kind: str, **inputs) -> Tensor:
    return small(kind).network(**inputs, return_dict=False)[0]


@pytest.mark.parametrize("name", ["upscaling_unet", "inpainting_unet"])
def test_further_channels_are_other_latents(name: str) -> None:
    noisy, condition = inputs_of(name)
    others = {key: value for key, value in condition.items() if key != "other_latents"}
    both = torch.cat([noisy, condition["other_latents"]], dim=1)
    expected = velocity_by_hand(name, sample=both, timestep=STEPS, **others)
    assert torch.equal(called(name), expected)


def test_unet() -> None:
    noisy, condition = inputs_of("unet")
    expected = velocity_by_hand("unet", sample=noisy, timestep=STEPS, class_labels=condition["labels"])
    assert torch.equal(called("unet"), expected)


def test_text_unet() -> None:
    noisy, condition = inputs_of("text_unet")
    assert torch.equal(called("text_unet"), velocity_by_hand("text_unet", sample=noisy, timestep=STEPS, **condition))


def test_sdxl() -> None:
    noisy, condition = inputs_of("sdxl")
    text = condition.pop("encoder_hidden_states")
    given = {"sample": noisy, "timestep": STEPS, "encoder_hidden_states": text}
    assert torch.equal(called("sdxl"), velocity_by_hand("sdxl", **given, added_cond_kwargs=condition))


def test_kandinsky_has_an_image_for_a_text_and_gives_the_mean_alone() -> None:
    noisy, condition = inputs_of("kandinsky")
    assert condition.keys() == {"image_embeds"}
    given = {"sample": noisy, "timestep": STEPS, "encoder_hidden_states": None, "added_cond_kwargs": condition}
    assert torch.equal(called("kandinsky"), velocity_by_hand("kandinsky", **given)[:, :4])


def test_dit() -> None:
    noisy, condition = inputs_of("dit")
    given = {"hidden_states": noisy, "timestep": STEPS, "class_labels": condition["labels"]}
    assert torch.equal(called("dit"), velocity_by_hand("dit", **given))


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
