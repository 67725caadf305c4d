"""The inputs of diffusion models have the right parts; tests of the families compare all with the pipelines'."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from models.diffusion_inputs import Given, guidance, mask_of

TIMES = torch.tensor([0.25, 0.75])


def given(noisy: torch.Tensor, config: dict | None = None, **condition: torch.Tensor) -> Given:
    return Given(SimpleNamespace(config=config or {}), noisy, TIMES, condition)


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
