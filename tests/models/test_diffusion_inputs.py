"""The inputs of diffusion models have the right parts; tests of the families compare all with the pipelines'."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from models.diffusion_inputs import Given, guidance, listed_text, mask_of_text_and_patches

TIMES = torch.tensor([0.25, 0.75])


def given(noisy: torch.Tensor, config: dict | None = None, **condition: torch.Tensor) -> Given:
    return Given(SimpleNamespace(config=config or {}), noisy, TIMES, condition)


def test_a_listed_text_has_the_tokens_that_count() -> None:
    text, mask = torch.randn(2, 3, 6), torch.tensor([[True, True, False], [True, True, True]])
    made = listed_text("text")(given(torch.zeros(2, 1), text=text, encoder_attention_mask=mask))["text"]
    assert torch.equal(made[0], text[0, :2])
    assert torch.equal(made[1], text[1])
    on_meta = listed_text("text")(given(torch.zeros(2, 1), text=text, encoder_attention_mask=mask.to("meta")))["text"]
    assert [len(one) for one in on_meta] == [3, 3]


def test_patches_count_in_a_mask_of_both() -> None:
    mask = torch.tensor([[True, True, False]])
    made = mask_of_text_and_patches("mask", 2)(given(torch.zeros(1, 4, 2, 4), mask=mask))["mask"]
    assert made.tolist() == [[True, True, False, True, True]]


def test_guidance_is_for_models_with_an_embedding_of_it() -> None:
    noisy = torch.zeros(2, 1).bfloat16()
    assert guidance(3.5)(given(noisy, {"guidance_embeds": False})) == {}
    made = guidance(3.5)(given(noisy, {"guidance_embeds": True}))["guidance"]
    assert (made.dtype, made.tolist()) == (torch.float32, [3.5, 3.5])
    assert guidance(3.5, rounded=True)(given(noisy, {"guidance_embeds": True}))["guidance"].dtype == torch.bfloat16
