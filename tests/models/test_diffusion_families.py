"""Each family against its own class called by hand, in small: scales of times, patches, places and conditions."""

import diffusers
import pytest
import torch
from torch import Tensor

from models.diffusion import DiffusionModel, build_diffusion
from models.diffusion_families import FAMILIES
from tests.offload.helpers.diffusion_architectures import HEADS, POOLED_WIDTH, TEXT_WIDTH, UNET

TIMES = torch.tensor([0.25, 0.75])
TEXT_UNET = {
    **UNET,
    "cross_attention_dim": TEXT_WIDTH,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
JOINT = {"joint_attention_dim": TEXT_WIDTH, "pooled_projection_dim": POOLED_WIDTH}
SMALL = {
    "unet": (
        "UNet2DModel",
        {
            **UNET,
            "in_channels": 1,
            "out_channels": 1,
            "num_class_embeds": 4,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        (1, 8, 8),
    ),
    "text_unet": ("UNet2DConditionModel", TEXT_UNET, (4, 8, 8)),
    "sdxl": (
        "UNet2DConditionModel",
        {
            **TEXT_UNET,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 4,
            "projection_class_embeddings_input_dim": 24 + POOLED_WIDTH,
        },
        (4, 8, 8),
    ),
    "dit": (
        "DiTTransformer2DModel",
        {**HEADS, "in_channels": 4, "num_layers": 2, "sample_size": 8, "num_embeds_ada_norm": 3},
        (4, 8, 8),
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            **HEADS,
            **JOINT,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "caption_projection_dim": 16,
            "pos_embed_max_size": 8,
        },
        (4, 8, 8),
    ),
    "flux": (
        "FluxTransformer2DModel",
        {
            **HEADS,
            **JOINT,
            "in_channels": 8,
            "num_layers": 1,
            "num_single_layers": 1,
            "axes_dims_rope": (4, 2, 2),
            "guidance_embeds": True,
        },
        (2, 4, 6),
    ),
    "ltx": (
        "LTXVideoTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 16,
            "num_layers": 2,
            "caption_channels": TEXT_WIDTH,
        },
        (4, 2, 4, 4),
    ),
    "wan": (
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": TEXT_WIDTH,
            "freq_dim": 8,
            "ffn_dim": 32,
            "num_layers": 2,
        },
        (4, 2, 4, 4),
    ),
}
EVERY_FAMILY = pytest.mark.parametrize("name", SMALL)


def small(name: str) -> DiffusionModel:
    torch.manual_seed(0)
    kind, options, _ = SMALL[name]
    return build_diffusion(kind, options).eval()


def inputs_of(name: str, tokens: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    """Random inputs for `small(name)`, with few tokens."""
    generator = torch.Generator().manual_seed(1)
    condition = {}
    for key, shape in small(name).condition_shapes.items():
        if key == "labels":
            condition[key] = torch.tensor([0, 2])
        else:
            shape = (tokens, *shape[1:]) if key == "encoder_hidden_states" else shape
            condition[key] = torch.randn(2, *shape, generator=generator)
    return torch.randn(2, *SMALL[name][2], generator=generator), condition


def called(name: str) -> Tensor:
    noisy, condition = inputs_of(name)
    return small(name)(noisy, TIMES, **condition)


def test_every_family_is_tested() -> None:
    assert {kind for kind, _, _ in SMALL.values()} == set(FAMILIES)


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
    model = small(name).bfloat16()
    velocity = model(noisy, TIMES, **condition)
    assert velocity.dtype == torch.bfloat16
    velocity.float().square().mean().backward()
    without = {key for key, parameter in model.named_parameters() if parameter.grad is None}
    assert len(without) <= 2, without


def velocity_by_hand(kind: str, **inputs) -> Tensor:
    return small(kind).network(**inputs, return_dict=False)[0]


def test_unet() -> None:
    noisy, condition = inputs_of("unet")
    expected = velocity_by_hand("unet", sample=noisy, timestep=TIMES * 1000, class_labels=condition["labels"])
    assert torch.equal(called("unet"), expected)


def test_text_unet() -> None:
    noisy, condition = inputs_of("text_unet")
    assert torch.equal(
        called("text_unet"), velocity_by_hand("text_unet", sample=noisy, timestep=TIMES * 1000, **condition)
    )


def test_sdxl() -> None:
    noisy, condition = inputs_of("sdxl")
    text = condition.pop("encoder_hidden_states")
    given = {"sample": noisy, "timestep": TIMES * 1000, "encoder_hidden_states": text}
    assert torch.equal(called("sdxl"), velocity_by_hand("sdxl", **given, added_cond_kwargs=condition))


def test_dit() -> None:
    noisy, condition = inputs_of("dit")
    given = {"hidden_states": noisy, "timestep": TIMES * 1000, "class_labels": condition["labels"]}
    assert torch.equal(called("dit"), velocity_by_hand("dit", **given))


def test_dit_drops_no_labels_of_its_own() -> None:
    noisy, condition = inputs_of("dit")
    model = small("dit").train()
    assert all(torch.equal(model(noisy, TIMES, **condition), called("dit")) for _ in range(20))


def test_dit_with_a_variance_gives_the_mean_alone() -> None:
    kind, options, shape = SMALL["dit"]
    model = build_diffusion(kind, {**options, "out_channels": 8})
    assert model(torch.randn(1, *shape), TIMES[:1], labels=torch.tensor([1])).shape == (1, 4, 8, 8)


def test_dit_refuses_other_sizes() -> None:
    with pytest.raises(ValueError, match=r"takes images of shape \[4, 8, 8\], not \[4, 8, 4\]"):
        small("dit")(torch.zeros(1, 4, 8, 4), TIMES[:1], labels=torch.tensor([1]))


def test_sd3() -> None:
    noisy, condition = inputs_of("sd3")
    given = {"hidden_states": noisy, "timestep": TIMES * 1000, **condition}
    assert torch.equal(called("sd3"), velocity_by_hand("sd3", **given))


def test_flux_is_packed_as_its_pipeline_does() -> None:
    from diffusers import FluxPipeline

    noisy, condition = inputs_of("flux")
    packed = FluxPipeline._pack_latents(noisy, 2, 2, 4, 6)
    output = velocity_by_hand(
        "flux",
        hidden_states=packed,
        timestep=TIMES,
        guidance=torch.full((2,), 3.5),
        img_ids=FluxPipeline._prepare_latent_image_ids(2, 2, 3, "cpu", torch.float32),
        txt_ids=torch.zeros(3, 3),
        **condition,
    )
    # The pipeline's sizes are in pixels: eight a latent.
    assert torch.equal(called("flux"), FluxPipeline._unpack_latents(output, 32, 48, 8))


def test_flux_refuses_odd_sizes() -> None:
    _, condition = inputs_of("flux")
    with pytest.raises(ValueError, match="must be multiples of 2, not 4 and 5"):
        small("flux")(torch.zeros(2, 2, 4, 5), TIMES, **condition)


def test_ltx_is_packed_as_its_pipeline_does() -> None:
    from diffusers import LTXPipeline

    noisy, condition = inputs_of("ltx")
    output = velocity_by_hand(
        "ltx",
        hidden_states=LTXPipeline._pack_latents(noisy),
        timestep=TIMES * 1000,
        encoder_attention_mask=torch.ones(2, 3),
        num_frames=2,
        height=4,
        width=4,
        rope_interpolation_scale=(8 / 25, 32, 32),
        **condition,
    )
    assert torch.allclose(called("ltx"), LTXPipeline._unpack_latents(output, 2, 4, 4), atol=1e-6)


def test_wan() -> None:
    noisy, condition = inputs_of("wan")
    given = {"hidden_states": noisy, "timestep": TIMES * 1000, **condition}
    assert torch.equal(called("wan"), velocity_by_hand("wan", **given))


@EVERY_FAMILY
def test_buffers_after_meta_are_those_of_the_cpu(name: str) -> None:
    kind, options, _ = SMALL[name]
    with torch.device("meta"):
        model = build_diffusion(kind, options)
    model.to_empty(device="cpu").fill_buffers()
    expected = dict(getattr(diffusers, kind)(**options).named_buffers())
    found = dict(model.network.named_buffers())
    assert found.keys() == expected.keys()
    assert bool(found) == (name in ("dit", "sd3", "wan"))
    for key, buffer in found.items():
        assert torch.equal(buffer, expected[key]), key


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("unet", {"out_channels": 2}, "in_channels=1: only in_channels=2"),
        (
            "unet",
            {"time_embedding_type": "fourier"},
            "time_embedding_type=fourier: only time_embedding_type=positional",
        ),
        ("unet", {"class_embed_type": "timestep"}, "class_embed_type=timestep: only class_embed_type=None"),
        ("text_unet", {"addition_embed_type": "image"}, "addition_embed_type=image: only text_time or null"),
        ("text_unet", {"encoder_hid_dim_type": "image_proj"}, "encoder_hid_dim_type=image_proj: only text_proj"),
        ("dit", {"out_channels": 3}, "in_channels=4: only in_channels=3"),
        ("flux", {"in_channels": 6}, "in_channels=6: must be a multiple of 4"),
        ("flux", {"patch_size": 2}, "patch_size=2: only patch_size=1"),
        ("ltx", {"patch_size_t": 2}, "patch_size_t=2: only"),
        ("flux", {"in_channels": "many"}, "FluxTransformer2DModel cannot be built with"),
        ("sdxl", {"addition_time_embed_dim": None}, "UNet2DConditionModel cannot be built with"),
        ("wan", {"image_dim": 4}, "image_dim=4: only"),
    ],
)
def test_configurations_with_other_inputs_are_refused(name: str, changes: dict, message: str) -> None:
    kind, options, _ = SMALL[name]
    with pytest.raises(ValueError, match=message):
        build_diffusion(kind, {**options, **changes})
