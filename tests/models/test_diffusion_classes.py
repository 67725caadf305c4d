"""Each class that is trained without a pipeline against the class called by hand, as its pipeline calls it."""

from __future__ import annotations

import diffusers
import pytest
import torch
from torch import Tensor

from models.diffusion import build_diffusion
from models.diffusion_classes import CLASSES
from models.library_dtypes import default_dtype
from tests.models.helpers.small_diffusion import OWN, SMALL, TIMES, inputs_of, small

STEPS = TIMES * 1000
EVERY = pytest.mark.parametrize("name", OWN)


def pairs(latents: Tensor) -> Tensor:
    """Latents as sequences of patches of 2 x 2, as the pipeline of Flux packs them."""
    return diffusers.FluxPipeline._pack_latents(latents, *latents.shape)


def of_flux(noisy: Tensor, given: dict[str, Tensor]) -> dict[str, object]:
    hidden = [pairs(noisy), *([pairs(given.pop("other_latents"))] if "other_latents" in given else [])]
    places = diffusers.FluxPipeline._prepare_latent_image_ids(2, 2, 3, "cpu", torch.float32)
    made = {"img_ids": places, "txt_ids": torch.zeros(3, 3), "guidance": torch.full((2,), 3.5)}
    return {"hidden_states": torch.cat(hidden, dim=2), "timestep": TIMES, **made, **given}


def of_ltx(noisy: Tensor, given: dict[str, Tensor]) -> dict[str, object]:
    made = {"num_frames": 2, "height": 4, "width": 4, "rope_interpolation_scale": (8 / 25, 32, 32)}
    made["encoder_attention_mask"] = None
    return {"hidden_states": diffusers.LTXPipeline._pack_latents(noisy), "timestep": STEPS, **made, **given}


def of_unet(noisy: Tensor, given: dict[str, Tensor]) -> dict[str, object]:
    latents = torch.cat([noisy, given.pop("other_latents")], dim=1) if "other_latents" in given else noisy
    return {"sample": latents, "timestep": STEPS, **given}


CALLS = {
    "dit": lambda noisy, given: {"hidden_states": noisy, "timestep": STEPS, "class_labels": given["labels"]},
    "flux": of_flux,
    "flux_fill": of_flux,
    "inpainting_unet": of_unet,
    "ltx": of_ltx,
    "sdxl": lambda noisy, given: of_unet(
        noisy, {"encoder_hidden_states": given.pop("encoder_hidden_states"), "added_cond_kwargs": given}
    ),
    "text_unet": of_unet,
    "unet": lambda noisy, given: of_unet(noisy, {"class_labels": given["labels"]}),
    "upscaling_unet": of_unet,
}


def test_every_class_is_tested() -> None:
    assert {SMALL[name][0] for name in OWN} == set(CLASSES)
    assert set(OWN) == set(CALLS)


@EVERY
@torch.no_grad()
def test_a_class_is_called_as_its_pipeline_calls_it(name: str) -> None:
    (noisy, condition), own = inputs_of(name), small(name)
    found = own(noisy, TIMES, **condition)
    if own.takes_steps:
        assert torch.equal(own(noisy, STEPS.long(), **condition), found)
    else:
        with pytest.raises(ValueError, match="takes times from 0 to 1, and no whole steps"):
            own(noisy, STEPS.long(), **condition)
    expected = own.network(**CALLS[name](noisy, condition), return_dict=False)[0]
    if "flux" in name:
        # The pipeline's sizes are in pixels: eight a latent.
        expected = diffusers.FluxPipeline._unpack_latents(expected, 8 * 4, 8 * 6, 8)
    if name == "ltx":
        expected = diffusers.LTXPipeline._unpack_latents(expected, *noisy.shape[2:])
    assert torch.equal(found, expected.reshape(noisy.shape))


@EVERY
@torch.no_grad()
def test_velocities_have_the_shape_of_the_images_and_depend_on_all_inputs(name: str) -> None:
    model, (noisy, condition) = small(name), inputs_of(name)
    inputs = {"noisy": noisy, "timestep": TIMES, **condition}
    velocity = model(**inputs)
    assert velocity.shape == noisy.shape
    for key, value in inputs.items():
        other = value + 1 if key == "labels" else value * 0.5
        assert not torch.equal(velocity, model(**inputs | {key: other})), key


@EVERY
def test_gradients_reach_every_layer_in_low_precision(name: str) -> None:
    noisy, condition = inputs_of(name)
    with default_dtype(torch.bfloat16):
        model = small(name).train()
    velocity = model(noisy, TIMES, **condition)
    assert velocity.dtype == torch.bfloat16
    velocity.float().square().mean().backward()
    without = {key for key, parameter in model.named_parameters() if parameter.grad is None}
    # What the last block makes of the text is not used.
    assert len(without) <= 6, without


@pytest.mark.parametrize("name", ["dit", "text_unet"])
def test_half_of_the_output_is_left_out_where_it_may_be_a_variance(name: str) -> None:
    (noisy, condition), model = inputs_of(name), small(name, out_channels=8)
    expected = model.network(**CALLS[name](noisy, condition), return_dict=False)[0]
    assert torch.equal(model(noisy, TIMES, **condition), expected[:, :4])


@pytest.mark.parametrize("name", ["ltx", "text_unet"])
@torch.no_grad()
def test_tokens_that_a_mask_leaves_out_do_not_count(name: str) -> None:
    noisy, condition = inputs_of(name, tokens=5)
    text, model = condition["encoder_hidden_states"], small(name)
    mask = {"encoder_attention_mask": torch.tensor([[1.0] * 2 + [0.0] * 3, [1.0] * 5])}
    other = {"encoder_hidden_states": torch.cat([text[:, :2], text[:, 2:] + torch.tensor([[[1.0]], [[0.0]]])], dim=1)}
    found = model(noisy, TIMES, **condition, **mask)
    assert torch.equal(found, model(noisy, TIMES, **other, **mask))
    assert not torch.equal(found, model(noisy, TIMES, **condition))
    # One without any token counts all.
    nothing = {"encoder_attention_mask": torch.zeros(2, 5)}
    torch.testing.assert_close(model(noisy, TIMES, **condition, **nothing), model(noisy, TIMES, **condition))
    with pytest.raises(
        ValueError, match=r"^encoder_attention_mask has the shape \[2, 4\]: it must be \[2, 5\], one for"
    ):
        model(noisy, TIMES, **condition, encoder_attention_mask=torch.ones(2, 4))


@torch.no_grad()
def test_captions_of_two_lengths_give_what_each_gives_alone() -> None:
    noisy, condition = inputs_of("ltx", tokens=5)
    text, model = condition["encoder_hidden_states"], small("ltx")
    text[0, 3:] = 0
    counted = torch.arange(5) < torch.tensor([[3], [5]])
    both = model(noisy, TIMES, encoder_hidden_states=text, encoder_attention_mask=counted)
    alone = [
        model(noisy[one], TIMES[one], encoder_hidden_states=text[one, :length])
        for one, length in ((slice(0, 1), 3), (slice(1, 2), 5))
    ]
    torch.testing.assert_close(both, torch.cat(alone), atol=1e-5, rtol=0)
    assert (model(noisy, TIMES, encoder_hidden_states=text)[0] - alone[0]).abs().max() > 1e-3


def test_dit_drops_no_labels_of_its_own() -> None:
    noisy, condition = inputs_of("dit")
    model, expected = small("dit").train(), small("dit")(noisy, TIMES, **condition)
    assert all(torch.equal(model(noisy, TIMES, **condition), expected) for _ in range(20))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("dit", (4, 8, 4), r"takes images of shape \[4, 8, 8\], not \[4, 8, 4\]"),
        ("flux", (2, 4, 5), r"multiples of a patch \[2, 2\], not \[4, 5\]"),
    ],
)
def test_other_sizes_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    _, condition = inputs_of(name)
    with pytest.raises(ValueError, match=message):
        small(name)(torch.zeros(2, *shape), TIMES, **condition)


def test_other_latents_of_another_size_are_refused() -> None:
    noisy, condition = inputs_of("inpainting_unet")
    condition["other_latents"] = condition["other_latents"][..., :2]
    with pytest.raises(ValueError, match=r"other_latents has the shape \[5, 8, 2\]: .* latents, \[8, 8\]"):
        small("inpainting_unet")(noisy, TIMES, **condition)


@pytest.mark.parametrize(
    ("name", "tokens"), [("flux", 6), ("ltx", 32), ("dit", 16), ("unet", None), ("text_unet", None)]
)
def test_tokens_are_the_patches_of_latents(name: str, tokens: int | None) -> None:
    assert small(name).tokens(SMALL[name][2]) == tokens


def test_channels_beyond_those_that_are_returned_are_a_condition() -> None:
    assert small("flux_fill").condition_shapes["other_latents"] == (4, None, None)
    assert small("ltx", in_channels=6).condition_shapes["other_latents"] == (2, None, None, None)
    assert small("upscaling_unet").sample_shape == (1, 8, 8)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("flux", {"in_channels": 6}, "in_channels=6: must be a multiple of 4"),
        ("flux", {"patch_size": 2}, "patch_size=2: only patch_size=1"),
        ("flux", {"in_channels": "many"}, "FluxTransformer2DModel cannot be built with"),
        ("ltx", {"out_channels": 8}, "out_channels=8: the model must return as many channels as it takes, 4"),
        ("unet", {"out_channels": 2}, "out_channels=2: the model must return as many channels as it takes, 1"),
        ("dit", {"out_channels": 6}, "out_channels=6: the model must return as many channels as it takes, 4"),
        (
            "unet",
            {"time_embedding_type": "fourier"},
            "time_embedding_type=fourier: only time_embedding_type=positional",
        ),
        ("text_unet", {"class_embed_type": "timestep"}, "class_embed_type=timestep: only class_embed_type=None"),
        ("text_unet", {"addition_embed_type": "text_image"}, "=text_image: only addition_embed_type=None or text_time"),
        ("text_unet", {"encoder_hid_dim_type": "text_image_proj"}, "=text_image_proj: only encoder_hid_dim_type=None"),
        ("text_unet", {"encoder_hid_dim": 8}, "encoder_hid_dim=8: only encoder_hid_dim=None"),
        ("sdxl", {"addition_time_embed_dim": None}, "UNet2DConditionModel cannot be built with"),
    ],
)
def test_configurations_with_other_inputs_are_refused(name: str, changes: dict, message: str) -> None:
    kind, options, _ = SMALL[name]
    with pytest.raises(ValueError, match=message):
        build_diffusion(kind, {**options, **changes})
