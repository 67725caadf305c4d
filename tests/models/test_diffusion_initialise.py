"""First values of diffusion models: diffusers' distributions and the papers', as a function of seed and name."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch
from torch import Tensor

from models.diffusion_classes import CLASSES
from models.diffusion_initialise import initialise_diffusion
from models.diffusion_network import DiffusersNetwork
from models.quantise import quantise
from models.quantise_formats import Int8
from offload import BounceLinear
from tests.models.helpers.small_diffusion import TIMES, build, inputs_of
from tests.offload.helpers.models import under

WIDE = {"attention_head_dim": 16}
# Small models, with changes that make layers large enough for statistics.
SMALL: dict[str, dict[str, object]] = {
    "dit": WIDE,
    "flux": {**WIDE, "axes_dims_rope": [4, 6, 6]},
    "ltx": {**WIDE, "cross_attention_dim": 32},
    "sd3": {**WIDE, "caption_projection_dim": 32},
    "text_unet": {"block_out_channels": [32, 64]},
    "unet": {"block_out_channels": [32, 64], "in_channels": 3, "out_channels": 3},
    "wan": {},
}


def built(name: str, device: str = "cpu") -> DiffusersNetwork:
    torch.manual_seed(0)
    with torch.device(device):
        return build(name, **SMALL[name])


def initialised(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> DiffusersNetwork:
    model = built(name, "meta").to(dtype).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.detach().fill_(torch.nan)
    model.initialise(seed)
    return model


def moments(value: Tensor) -> tuple[float, float, float]:
    return value.mean().item(), value.std().item(), value.abs().max().item()


def test_every_class_that_begins_as_a_paper_says_is_tested() -> None:
    begun = {type(built(name, "meta").network).__name__ for name in SMALL}
    assert {kind for kind, row in CLASSES.items() if row.first_stds} <= begun


@pytest.mark.parametrize("name", SMALL)
def test_layers_begin_as_diffusers_makes_them_or_as_the_papers_say(name: str):
    model = built(name)
    own, stds = model.network, model.first_stds
    found = dict(initialised(name).network.named_parameters())
    for key, made in own.named_parameters():
        value, path = found[key], key.rpartition(".")[0]
        std = next((std for pattern, std in stds.items() if fnmatchcase(path, pattern) or key == pattern), None)
        if std is not None:
            expected = 0.0 if key.endswith("bias") else std
            assert value.std().item() == pytest.approx(expected, rel=0.3), key
        elif made.unique().numel() == 1:
            assert torch.equal(value, made), key
        elif made.numel() >= 500:
            # The mean is of that many numbers; the largest of uniform ones is near the bound.
            (mean, deviation, largest), expected = moments(value), moments(made.detach())
            assert abs(mean) < 5 * expected[1] / made.numel() ** 0.5, key
            assert deviation == pytest.approx(expected[1], rel=0.15), key
            assert largest == pytest.approx(expected[2], rel=0.5 if "embedding" in key else 0.25), key
        assert value.isfinite().all()
    paths = {*dict(own.named_modules()), *found}
    assert all(any(fnmatchcase(path, pattern) for path in paths) for pattern in stds)


@pytest.mark.parametrize("name", ["dit", "flux", "ltx"])
def test_the_first_velocity_is_zero(name: str):
    model, (noisy, condition) = initialised(name), inputs_of(name)
    model.fill_buffers()
    assert not model(noisy, TIMES, **condition).any()


def test_values_are_a_function_of_seed_and_name_in_every_mode_and_dtype():
    name = "wan"
    expected = dict(initialised(name).named_parameters())
    assert not any(
        torch.equal(p, expected[n]) for n, p in initialised(name, 1).named_parameters() if p.unique().numel() > 1
    )
    model = built(name, "meta")
    with under(BounceLinear(slots=8), model):
        model.initialise(0)
        for key, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[key]), key
    for key, parameter in initialised(name, dtype=torch.bfloat16).named_parameters():
        assert torch.equal(parameter, expected[key].bfloat16()), key


def test_random_numbers_and_buffers_stay():
    model, state = built("sd3"), torch.get_rng_state()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.initialise(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_what_cannot_be_initialised_is_refused():
    with pytest.raises(ValueError, match="is on the meta device: allocate its memory before initialising it"):
        built("unet", "meta").initialise(0)
    whole = torch.nn.ParameterDict({"table": torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)})
    with pytest.raises(ValueError, match=r"table has dtype torch\.int64: only floating-point parameters"):
        initialise_diffusion(whole, lambda: whole, {}, 0)


def test_a_weight_in_few_bits_is_quantised_from_the_same_numbers() -> None:
    name, key = "sd3", "network.transformer_blocks.0.attn.to_q.weight"
    expected = initialised(name).get_parameter(key).detach()
    model = built(name)
    quantise(model, [key], Int8())
    model.initialise(0)
    found = model.get_parameter(key).dequantised()
    assert torch.allclose(found, expected, atol=expected.abs().max().item() / 100)
    assert not torch.equal(found, expected)
