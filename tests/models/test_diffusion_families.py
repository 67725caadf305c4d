"""Each row of the table against its class called by hand as its pipeline does, in small."""

from __future__ import annotations

import inspect
from fnmatch import fnmatchcase

import diffusers
import pytest
import torch

from models.diffusion import build_diffusion
from models.diffusion_families import FAMILIES, REASONS, reason_against
from models.library_dtypes import default_dtype
from tests.models.helpers.pipeline_calls import BACKWARDS, CALLS, FORMS, back
from tests.models.helpers.small_diffusion import SMALL, TIMES, inputs_of, small

# The layers of Flux 3 for further images, which are not given.
FOR_IMAGES_TO_CHANGE = ".image_cond."
_OF_LATENTS = "a mask of latents"
_ZEROS = "its pipelines fill texts with zeros, and give no mask"
# Arguments of forwards that are no conditions.
NO_MASKS_OF_TEXTS = {
    "AllegroTransformer3DModel": {"attention_mask": _OF_LATENTS},
    "AudioLDM2UNet2DConditionModel": {"attention_mask": _OF_LATENTS},
    "CogView4Transformer2DModel": {"attention_mask": "attention adds it, 1 or 0, and leaves nothing out"},
    "CosmosTransformer3DModel": {
        "attention_mask": _ZEROS,
        "condition_mask": "a mask of frames",
        "padding_mask": "a mask of pixels",
    },
    "DreamLiteUNetModel": {"attention_mask": _OF_LATENTS},
    "HiDreamImageTransformer2DModel": {"hidden_states_masks": _OF_LATENTS},
    "LongCatAudioDiTTransformer": {"attention_mask": _OF_LATENTS},
    "PixArtTransformer2DModel": {"attention_mask": _OF_LATENTS},
    "QwenImage21Transformer2DModel": {"img_mask": "places of images among the tokens"},
    "SanaTransformer2DModel": {"attention_mask": _OF_LATENTS},
    "SanaVideoTransformer3DModel": {"attention_mask": _OF_LATENTS},
    "StableAudioDiTModel": {"attention_mask": _OF_LATENTS, "encoder_attention_mask": _ZEROS},
    "UNet2DConditionModel": {"attention_mask": _OF_LATENTS},
    "UNet3DConditionModel": {"attention_mask": _OF_LATENTS},
    "UNetMotionModel": {"attention_mask": _OF_LATENTS},
    "ZImageTransformer2DModel": {"image_noise_mask": _OF_LATENTS},
}
# Kandinsky 2.2 takes the embedding of an image, and no text.
WITH_MASKS = [name for name, (kind, _, _) in SMALL.items() if FAMILIES[kind].masks and name != "kandinsky"]
# Their classes also take a mean over all tokens.
POOLED = ("hunyuan_dit", "kandinsky3")
EVERY_FAMILY = pytest.mark.parametrize("name", SMALL)


def test_every_class_is_tested() -> None:
    assert {kind for kind, _, _ in SMALL.values()} == set(FAMILIES)
    of_labels = {"dit", "dreamlite", "inpainting_unet", "kandinsky", "sdxl", "text_unet", "unet", "upscaling_unet"}
    assert SMALL.keys() - of_labels == CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_a_class_is_called_as_its_pipeline_calls_it(name: str) -> None:
    noisy, condition = inputs_of(name)
    given = {key: FORMS.get(key, lambda value: value)(value) for key, value in condition.items()}
    with torch.no_grad():
        arguments = given | CALLS[name](name, noisy)
        # It is among the channels.
        arguments.pop("other_latents", None)
        own = small(name)
        output = own.network(**arguments, return_dict=False)
        found = own(noisy, TIMES, **condition)
        if own.takes_steps:
            assert torch.equal(own(noisy, (TIMES * 1000).long(), **condition), found)
        else:
            with pytest.raises(ValueError, match="takes times from 0 to 1, and no whole steps"):
                own(noisy, (TIMES * 1000).long(), **condition)
    expected = back(name, output[0] if isinstance(output, tuple) else output, noisy)
    assert torch.allclose(found, -expected if name in BACKWARDS else expected, atol=1e-6)


@EVERY_FAMILY
def test_velocities_have_the_shape_of_the_images_and_depend_on_all_inputs(name: str) -> None:
    model, (noisy, condition) = small(name), inputs_of(name)
    inputs = {"noisy": noisy, "timestep": TIMES, **condition}
    with torch.no_grad():
        velocity = model(**inputs)
        assert velocity.shape == noisy.shape
        for key, value in inputs.items():
            other = value + 1 if key == "labels" else value * 0.5
            assert not torch.equal(velocity, model(**inputs | {key: other})), key


@EVERY_FAMILY
def test_gradients_reach_every_layer_in_low_precision(name: str) -> None:
    noisy, condition = inputs_of(name)
    with default_dtype(torch.bfloat16):
        model = small(name).train()
    velocity = model(noisy, TIMES, **condition)
    assert velocity.dtype == torch.bfloat16
    assert velocity.shape == noisy.shape
    velocity.float().square().mean().backward()
    without = {key for key, parameter in model.named_parameters() if parameter.grad is None}
    without -= {key for key in without if name == "flux3" and FOR_IMAGES_TO_CHANGE in key}
    # What the last block makes of the text is not used.
    assert len(without) <= 6, without


@EVERY_FAMILY
def test_buffers_after_meta_are_those_of_the_cpu(name: str) -> None:
    kind, options, _ = SMALL[name]
    with torch.device("meta"):
        model = build_diffusion(kind, options)
    model.to_empty(device="cpu").fill_buffers()
    expected = dict(getattr(diffusers, kind)(**options).named_buffers())
    found = dict(model.network.named_buffers())
    assert found.keys() == expected.keys()
    for key, buffer in found.items():
        assert torch.equal(buffer, expected[key]), key


def test_every_mask_of_a_text_is_a_condition() -> None:
    found = {}
    for name, family in FAMILIES.items():
        arguments = inspect.signature(getattr(diffusers, name).forward).parameters
        if others := {key for key in arguments if "mask" in key} - family.masks.keys():
            found[name] = others
    assert found == {name: set(reasons) for name, reasons in NO_MASKS_OF_TEXTS.items()}


@pytest.mark.parametrize("name", WITH_MASKS)
def test_tokens_that_a_mask_leaves_out_do_not_count(name: str) -> None:
    noisy, condition = inputs_of(name, tokens=5)
    model, masks, other = small(name), {}, dict(condition)
    for mask, text in FAMILIES[SMALL[name][0]].text_masks(model.network.config).items():
        masks[mask] = torch.ones(2, condition[text].shape[-2])
        masks[mask][0, 2:] = 0
        other[text] = condition[text].clone()
        other[text][0, ..., 2:, :] += 1
    assert set(model.optional_conditions) == set(masks)
    with torch.no_grad():
        found, changed = (model(noisy, TIMES, **given, **masks) for given in (condition, other))
        assert not torch.equal(model(noisy, TIMES, **condition), model(noisy, TIMES, **other))
    assert torch.equal(found, changed) != (name in POOLED)
    assert not torch.equal(found, model(noisy, TIMES, **condition))


@pytest.mark.parametrize(
    "name", ["qwen", "lumina2", "chroma", "hunyuan_video", "z_image", "ernie_image", "krea2", "ltx"]
)
def test_captions_of_two_lengths_give_what_each_gives_alone(name: str) -> None:
    noisy, condition = inputs_of(name, tokens=5)
    model = small(name)
    ((mask, text),) = FAMILIES[SMALL[name][0]].text_masks(model.network.config).items()
    condition[text][0, ..., 3:, :] = 0
    short, long = ({key: value[place] for key, value in condition.items()} for place in (slice(0, 1), slice(1, 2)))
    short[text] = short[text][..., :3, :]
    counted = torch.arange(5) < torch.tensor([[3], [5]])
    with torch.no_grad():
        both = model(noisy, TIMES, **condition, **{mask: counted})
        alone = torch.cat([model(noisy[:1], TIMES[:1], **short), model(noisy[1:], TIMES[1:], **long)])
        without = model(noisy, TIMES, **condition)
    torch.testing.assert_close(both, alone, atol=1e-5, rtol=0)
    assert (without[0] - alone[0]).abs().max() > 1e-3


def test_other_latents_of_another_size_are_refused() -> None:
    noisy, condition = inputs_of("wan_image")
    condition["other_latents"] = condition["other_latents"][..., :2]
    with pytest.raises(ValueError, match=r"other_latents has the shape \[5, 2, 4, 2\]: .* latents, \[2, 4, 4\]"):
        small("wan_image")(noisy, TIMES, **condition)


def test_latte_refuses_other_numbers_of_frames() -> None:
    _, condition = inputs_of("latte")
    with pytest.raises(ValueError, match=r"takes images of shape \[4, 2, 4, 4\], not \[4, 3, 4, 4\]"):
        small("latte")(torch.zeros(2, 4, 3, 4, 4), TIMES, **condition)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("flux", {"in_channels": 6}, "in_channels=6: must be a multiple of 4"),
        ("flux", {"patch_size": 2}, "patch_size=2: only patch_size=1"),
        ("flux", {"in_channels": "many"}, "FluxTransformer2DModel cannot be built with"),
        ("wan", {"out_channels": 8}, "out_channels=8: the model must return as many channels as it takes, 4"),
        ("audioldm2", {"cross_attention_dim": 12}, "cross_attention_dim=12: only three widths for each block are supp"),
        ("unet", {"out_channels": 2}, "in_channels=1: only in_channels=2"),
        (
            "unet",
            {"time_embedding_type": "fourier"},
            "time_embedding_type=fourier: only time_embedding_type=positional",
        ),
        ("text_unet", {"class_embed_type": "timestep"}, "class_embed_type=timestep: only class_embed_type=None"),
        ("text_unet", {"addition_embed_type": "text_image"}, "=text_image: only text, text_time, image or null"),
        ("text_unet", {"encoder_hid_dim_type": "text_image_proj"}, "=text_image_proj: only text_proj, image_proj or"),
        ("dit", {"out_channels": 3}, "in_channels=4: only in_channels=3"),
        ("sdxl", {"addition_time_embed_dim": None}, "UNet2DConditionModel cannot be built with"),
    ],
)
def test_configurations_with_other_inputs_are_refused(name: str, changes: dict, message: str) -> None:
    kind, options, _ = SMALL[name]
    with pytest.raises(ValueError, match=message):
        build_diffusion(kind, {**options, **changes})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("AutoencoderKLWan", "it encodes or decodes images, sounds or videos"),
        ("LTX2VideoTransformer3DModel", "it makes a video and a sound at once"),
    ],
)
def test_a_class_that_does_not_fit_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: {name} is not supported: {reason}"):
        build_diffusion(name)


def test_no_supported_class_has_a_reason_against_it() -> None:
    assert not [name for name in FAMILIES if reason_against(name)]
    assert reason_against("Flux9Transformer2DModel") is None


def test_every_class_of_diffusers_was_looked_at() -> None:
    classes = [getattr(diffusers, name) for name in dir(diffusers) if name.endswith(("Model", "Transformer", "UNet"))]
    names = {each.__name__ for each in classes if isinstance(each, type) and issubclass(each, diffusers.ModelMixin)}
    assert len(names) > 100
    assert sorted(name for name in names - FAMILIES.keys() if reason_against(name) is None) == []


def test_every_pattern_is_that_of_a_class() -> None:
    names = dir(diffusers)
    assert not [pattern for pattern in REASONS if not any(fnmatchcase(name, pattern) for name in names)]
