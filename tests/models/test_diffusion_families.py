"""Each row of the table against its class called by hand as its pipeline does, in small."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import diffusers
import pytest
import torch
from torch import Tensor

from models.diffusion import build_diffusion
from models.diffusion_families import FAMILIES
from tests.models.helpers.small_diffusion import SMALL, TIMES, inputs_of, small

EVERY_FAMILY = pytest.mark.parametrize("name", SMALL)
STEPS = TIMES * 1000
Arguments = dict[str, object]


def pixels(name: str) -> Tensor:
    """Height and width of two images in pixels, of 8 a latent."""
    return torch.tensor([[8.0 * side for side in SMALL[name][2][-2:]]]).expand(2, 2)


def ones(*shape: int) -> Tensor:
    return torch.ones(2, *shape, dtype=torch.bool)


def pairs(noisy: Tensor) -> Tensor:
    """Latents as sequences of patches of 2 x 2, as the pipeline of Flux packs them."""
    return diffusers.FluxPipeline._pack_latents(noisy, *noisy.shape)


def of_pairs(name: str, noisy: Tensor, **others: object) -> Arguments:
    """The call of a model like Flux, with the places of its pipeline."""
    rows, columns = (side // 2 for side in noisy.shape[-2:])
    image = diffusers.FluxPipeline._prepare_latent_image_ids(2, rows, columns, "cpu", torch.float32)
    made = {"hidden_states": pairs(noisy), "img_ids": image, "txt_ids": torch.zeros(3, 3), "timestep": TIMES}
    return made | others


def of_flux2(name: str, noisy: Tensor) -> Arguments:
    pipeline = diffusers.Flux2Pipeline
    patches = pipeline._patchify_latents(noisy)
    return {
        "hidden_states": pipeline._pack_latents(patches),
        "img_ids": pipeline._prepare_latent_ids(patches),
        "txt_ids": pipeline._prepare_text_ids(torch.empty(2, 3, 1)),
        "timestep": TIMES,
        "guidance": torch.full((2,), 4.0),
    }


def of_longcat(name: str, noisy: Tensor) -> Arguments:
    from diffusers.pipelines.longcat_image.pipeline_longcat_image import prepare_pos_ids

    image = prepare_pos_ids(modality_id=1, type="image", start=(512, 512), height=2, width=3)
    return of_pairs(name, noisy, img_ids=image, txt_ids=prepare_pos_ids(num_token=3))


def of_cogvideo(name: str, noisy: Tensor) -> Arguments:
    pipeline = SimpleNamespace(transformer=small(name).network, vae_scale_factor_spatial=8)
    height, width = (8 * side for side in noisy.shape[-2:])
    make = diffusers.CogVideoXPipeline._prepare_rotary_positional_embeddings
    rotary = make(pipeline, height, width, noisy.shape[2], "cpu")
    return {"hidden_states": noisy.transpose(1, 2), "timestep": STEPS, "image_rotary_emb": rotary}


def of_allegro(name: str, noisy: Tensor) -> Arguments:
    pipeline = SimpleNamespace(transformer=small(name).network, vae_scale_factor_spatial=8)
    height, width = (8 * side for side in noisy.shape[-2:])
    make = diffusers.AllegroPipeline._prepare_rotary_positional_embeddings
    return of_steps(name, noisy, image_rotary_emb=make(pipeline, 2, height, width, noisy.shape[2], "cpu"))


def of_hunyuan_dit(name: str, noisy: Tensor) -> Arguments:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed
    from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid

    crop = get_resize_crop_region_for_grid((4, 4), 512 // 8 // 2)
    sizes = pixels(name)
    return of_steps(
        name,
        noisy,
        text_embedding_mask=ones(3),
        text_embedding_mask_t5=ones(3),
        image_meta_size=torch.cat([sizes, sizes, torch.zeros(2, 2)], dim=1),
        style=torch.zeros(2, dtype=torch.int64),
        image_rotary_emb=get_2d_rotary_pos_embed(8, crop, (4, 4), device="cpu", output_type="pt"),
    )


def of_lumina_next(name: str, noisy: Tensor) -> Arguments:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    rotary = get_2d_rotary_pos_embed_lumina(8, 384, 384, linear_factor=1.0, ntk_factor=1.0)
    made = {"encoder_mask": ones(3), "image_rotary_emb": rotary, "cross_attention_kwargs": {}}
    return {"hidden_states": noisy, "timestep": 1 - TIMES, **made}


def of_ltx(name: str, noisy: Tensor) -> Arguments:
    made = {"num_frames": 2, "height": 4, "width": 4, "rope_interpolation_scale": (8 / 25, 32, 32)}
    made["encoder_attention_mask"] = None
    return {"hidden_states": diffusers.LTXPipeline._pack_latents(noisy), "timestep": STEPS, **made}


def of_kandinsky5(name: str, noisy: Tensor) -> Arguments:
    places = [torch.arange(count) for count in (2, 2, 2)]
    made = {"visual_rope_pos": places, "text_rope_pos": torch.arange(3)}
    return {"hidden_states": noisy.permute(0, 2, 3, 4, 1), "timestep": STEPS, **made}


def of_stable_audio(name: str, noisy: Tensor) -> Arguments:
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    rotary = get_1d_rotary_pos_embed(4, 7, use_real=True, repeat_interleave_real=False)
    return {"hidden_states": noisy, "timestep": TIMES, "rotary_embedding": rotary}


def of_steps(name: str, noisy: Tensor, **others: object) -> Arguments:
    """The call of a model that takes latents as they are, and times of 1000 steps."""
    return {"hidden_states": noisy, "timestep": STEPS, **others}


def of_sample(name: str, noisy: Tensor, **others: object) -> Arguments:
    return {"sample": noisy, "timestep": STEPS, **others}


def beside(name: str, noisy: Tensor, dim: int = 1) -> Tensor:
    """Latents with the other ones after their channels, which are dimension `dim` of the model's input."""
    return torch.cat([noisy.movedim(1, dim), inputs_of(name)[1]["other_latents"].movedim(1, dim)], dim=dim)


def of_flux_fill(name: str, noisy: Tensor) -> Arguments:
    both = torch.cat([pairs(noisy), pairs(inputs_of(name)[1]["other_latents"])], dim=2)
    return of_pairs(name, noisy, hidden_states=both, guidance=torch.full((2,), 3.5))


def sizes(name: str, noisy: Tensor) -> Arguments:
    found = pixels(name)
    return of_steps(name, noisy, original_size=found, target_size=found, crop_coords=torch.zeros(2, 2))


def resolution(name: str, noisy: Tensor) -> Arguments:
    return of_steps(name, noisy, added_cond_kwargs={"resolution": pixels(name), "aspect_ratio": torch.ones(2, 1)})


# What the pipeline of each class passes, besides the conditions under their own names.
CALLS: dict[str, Callable[[str, Tensor], Arguments]] = {
    "allegro": of_allegro,
    "auraflow": lambda name, noisy: of_steps(name, noisy, timestep=TIMES),
    "bria": lambda name, noisy: of_pairs(name, noisy, timestep=STEPS),
    "cascade": lambda name, noisy: {"sample": noisy, "timestep_ratio": TIMES},
    "chroma": lambda name, noisy: of_pairs(name, noisy, attention_mask=ones(9)),
    "cogvideox": of_cogvideo,
    "cogvideox15": of_cogvideo,
    "cogvideox_image": lambda name, noisy: of_steps(name, beside(name, noisy, 2), ofs=torch.full((1,), 2.0)),
    "cogview3": sizes,
    "cogview4": sizes,
    "cogview4_control": lambda name, noisy: sizes(name, noisy) | {"hidden_states": beside(name, noisy)},
    "consisid": lambda name, noisy: of_steps(name, noisy, hidden_states=noisy.transpose(1, 2)),
    "cosmos": lambda name, noisy: of_steps(name, noisy, timestep=TIMES),
    "easyanimate": of_steps,
    "ernie_image": lambda name, noisy: of_steps(name, noisy, text_lens=torch.tensor([3, 3])),
    "flux": lambda name, noisy: of_pairs(name, noisy, guidance=torch.full((2,), 3.5)),
    "flux2": of_flux2,
    "flux_fill": of_flux_fill,
    "hidream": lambda name, noisy: {"hidden_states": noisy, "timesteps": STEPS},
    "hunyuan_dit": of_hunyuan_dit,
    "hunyuan_image": lambda name, noisy: of_steps(
        name, noisy, encoder_attention_mask=ones(3), guidance=torch.full((2,), 3500.0)
    ),
    "hunyuan_video": lambda name, noisy: of_steps(
        name, noisy, encoder_attention_mask=ones(3), guidance=torch.full((2,), 6000.0)
    ),
    "hunyuan_video15": lambda name, noisy: of_steps(
        name, beside(name, noisy), encoder_attention_mask=ones(3), encoder_attention_mask_2=ones(3)
    ),
    "i2vgen": lambda name, noisy: of_sample(name, noisy, fps=torch.full((2,), 16.0)),
    "kandinsky3": lambda name, noisy: of_sample(name, noisy, encoder_attention_mask=ones(3)),
    "kandinsky5": of_kandinsky5,
    "kandinsky5_image": lambda name, noisy: of_kandinsky5(name, beside(name, noisy)),
    "latte": of_steps,
    "longcat": of_longcat,
    "ltx": of_ltx,
    "lumina2": lambda name, noisy: of_steps(name, noisy, timestep=1 - TIMES, encoder_attention_mask=ones(3)),
    "lumina_next": of_lumina_next,
    "mochi": lambda name, noisy: of_steps(name, noisy, timestep=1000 * (1 - TIMES), encoder_attention_mask=ones(3)),
    "ovis": lambda name, noisy: of_pairs(
        name, noisy, txt_ids=torch.arange(3.0)[:, None] * torch.tensor([0.0, 1.0, 1.0])
    ),
    "pixart": resolution,
    "prior": of_steps,
    "prx": lambda name, noisy: of_steps(name, noisy, timestep=TIMES),
    "qwen": lambda name, noisy: {"hidden_states": pairs(noisy), "timestep": TIMES, "img_shapes": [[(1, 2, 3)]] * 2},
    # Its scale of times is 1, that of its guidance 0.1.
    "sana": lambda name, noisy: of_steps(name, noisy, guidance=torch.full((2,), 0.45)),
    "sana_video": of_steps,
    "sd3": of_steps,
    "skyreels": of_steps,
    "skyreels_image": lambda name, noisy: of_steps(name, beside(name, noisy)),
    "stable_audio": of_stable_audio,
    "svd": lambda name, noisy: of_sample(name, beside(name, noisy, 2)),
    "unet_1d": lambda name, noisy: of_sample(name, noisy, timestep=TIMES),
    "unet_3d": of_sample,
    # Its text is that of each frame.
    "unet_motion": lambda name, noisy: of_sample(
        name, noisy, encoder_hidden_states=inputs_of(name)[1]["encoder_hidden_states"].repeat_interleave(2, dim=0)
    ),
    "wan": of_steps,
    "wan_image": lambda name, noisy: of_steps(name, beside(name, noisy)),
    "z_image": lambda name, noisy: {"x": list(noisy[:, :, None]), "t": 1 - TIMES},
}
# Conditions that a model takes in another form.
FORMS: dict[str, Callable[[Tensor], object]] = {
    "encoder_hidden_states_llama3": lambda layers: layers.transpose(0, 1),
    "cap_feats": list,
}
# Those whose output is the velocity from noise to image.
BACKWARDS = ("hidream", "lumina2", "lumina_next", "mochi", "z_image")


def back(name: str, output: object, noisy: Tensor) -> Tensor:
    """The output of a model in the layout of its latents, as its pipeline brings it there."""
    height, width = noisy.shape[-2:] if noisy.ndim > 3 else (0, 0)
    if name == "flux2":
        patches = output.transpose(1, 2).reshape(2, -1, height // 2, width // 2)
        return diffusers.Flux2Pipeline._unpatchify_latents(patches)
    if name in ("bria", "chroma", "flux", "flux_fill", "longcat", "ovis", "qwen"):
        # The pipeline's sizes are in pixels: eight a latent.
        found = diffusers.FluxPipeline._unpack_latents(output, 8 * height, 8 * width, 8)
        return found.reshape(noisy.shape)
    if name == "ltx":
        return diffusers.LTXPipeline._unpack_latents(output, *noisy.shape[2:])
    if name.startswith("cogvideox") or name in ("consisid", "svd"):
        return output.transpose(1, 2)
    if name.startswith("kandinsky5"):
        return output.permute(0, 4, 1, 2, 3)
    return torch.stack(list(output)).squeeze(2) if name == "z_image" else output[:, : noisy.shape[1]]


def test_every_class_is_tested() -> None:
    assert {kind for kind, _, _ in SMALL.values()} == set(FAMILIES)
    of_labels = {"dit", "inpainting_unet", "kandinsky", "sdxl", "text_unet", "unet", "upscaling_unet"}
    assert SMALL.keys() - of_labels == CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_a_class_is_called_as_its_pipeline_calls_it(name: str) -> None:
    noisy, condition = inputs_of(name)
    given = {key: FORMS.get(key, lambda value: value)(value) for key, value in condition.items()}
    with torch.no_grad():
        arguments = given | CALLS[name](name, noisy)
        # It is among the channels.
        arguments.pop("other_latents", None)
        output = small(name).network(**arguments, return_dict=False)
        found = small(name)(noisy, TIMES, **condition)
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
    model = small(name).train().bfloat16()
    velocity = model(noisy, TIMES, **condition)
    assert velocity.dtype == torch.bfloat16
    assert velocity.shape == noisy.shape
    velocity.float().square().mean().backward()
    without = {key for key, parameter in model.named_parameters() if parameter.grad is None}
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


def test_flux_refuses_odd_sizes() -> None:
    _, condition = inputs_of("flux")
    with pytest.raises(ValueError, match=r"multiples of a patch \[2, 2\], not \[4, 5\]"):
        small("flux")(torch.zeros(2, 2, 4, 5), TIMES, **condition)


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
        ("ltx", {"patch_size_t": 2}, "patch_size_t=2: only"),
        ("wan", {"pos_embed_seq_len": 4}, "pos_embed_seq_len=4: only"),
        ("wan", {"out_channels": 8}, "out_channels=8: the model must return as many channels as it takes, 4"),
        ("mochi", {"out_channels": 2}, "out_channels=2: the model must return as many channels as it takes, 4"),
        ("consisid", {"is_train_face": True}, "is_train_face=True: only"),
        ("cascade", {"effnet_in_channels": 4}, "effnet_in_channels=4: only"),
        ("bria", {"guidance_embeds": True}, "guidance_embeds=True: only"),
        ("latte", {"norm_type": "layer_norm"}, "norm_type=layer_norm: only"),
        ("prior", {"clip_embed_dim": 4}, "clip_embed_dim=4: the model must return as many"),
        ("unet_1d", {"time_embedding_type": "positional"}, "time_embedding_type=positional: only"),
    ],
)
def test_configurations_with_other_inputs_are_refused(name: str, changes: dict, message: str) -> None:
    kind, options, _ = SMALL[name]
    with pytest.raises(ValueError, match=message):
        build_diffusion(kind, {**options, **changes})
