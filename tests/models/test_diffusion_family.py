"""The general rule by which a class is called: sizes from configurations, times, layouts and directions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from models.diffusion_family import Called, require, size_of, square
from models.diffusion_layouts import CHANNELS_LAST, Patches

CONFIG = {"in_channels": 4, "out_channels": None, "width": 6, "widths": [3, 5], "none": None, "side": 2}
TIMES = torch.tensor([0.25, 0.75])


class Network:
    """Notes what it is called with, and returns its latents."""

    def __init__(self, **changes: object):
        self.config = {**CONFIG, **changes}

    def __call__(self, **inputs: object) -> tuple[Tensor]:
        self.inputs = inputs
        return (inputs["hidden_states"] * 2,)


@pytest.mark.parametrize(
    ("size", "found"),
    [
        (7, 7),
        ("width", 6),
        ("widths.1", 5),
        ("none", None),
        ("absent", None),
        ("none|width", 6),
        (lambda config: config["width"] + 1, 7),
    ],
)
def test_sizes_come_from_the_configuration(size: object, found: int | None) -> None:
    assert size_of(CONFIG, size) == found


def test_conditions_of_null_sizes_are_not_taken() -> None:
    family = Called(sizes={"text": (3, "width"), "pooled": ("none",)})
    assert family.condition_shapes(CONFIG) == {"text": (3, 6)}


def test_the_size_of_images_is_known_where_all_its_sides_are() -> None:
    assert Called(sample=("side", "side")).sample_shape(CONFIG) == (4, 2, 2)
    assert Called(sample=("side", "none")).sample_shape(CONFIG) is None
    assert Called().sample_shape(CONFIG) is None
    assert Called(layout=Patches((2, 1)), sample=("side", "side")).sample_shape(CONFIG) == (2, 2, 2)


def test_times_are_scaled_and_float32_unless_they_are_rounded() -> None:
    network, noisy = Network(), torch.randn(2, 4, 2, 2).bfloat16()
    Called().velocity(network, noisy, TIMES, {})
    assert torch.equal(network.inputs["timestep"], TIMES * 1000)
    Called(steps=1, time="t", rounded=True).velocity(network, noisy, TIMES, {})
    assert torch.equal(network.inputs["t"], TIMES.bfloat16())


def test_whole_steps_go_in_as_they_are_where_a_class_counts_them() -> None:
    network, noisy, steps = Network(), torch.randn(2, 4, 2, 2), torch.tensor([0, 999])
    Called().velocity(network, noisy, steps, {})
    assert network.inputs["timestep"] is steps
    Called(rounded=True).velocity(network, noisy.bfloat16(), steps, {})
    assert torch.equal(network.inputs["timestep"], steps.bfloat16())
    assert Called().takes_steps(CONFIG)
    assert not any(
        Called(**one).takes_steps(CONFIG) for one in ({"steps": 1}, {"from_noise": True}, {"to_image": True})
    )


def test_tokens_are_the_patches_of_latents() -> None:
    assert Called(layout=Patches((2, 1))).tokens({"patch_size": 1}, (4, 6, 4)) == 12
    assert Called().tokens({"patch_size": 2}, (4, 6, 4)) == 6
    assert Called().tokens({"patch_size": 2, "patch_size_t": 3}, (4, 6, 4, 4)) == 8
    assert Called().tokens({"patch_size": (1, 2, 2)}, (4, 6, 4, 4)) == 24
    assert Called().tokens({}, (4, 6, 4)) is None


def test_a_class_that_counts_from_noise_to_image_is_turned_round() -> None:
    network, noisy = Network(), torch.randn(2, 4, 2, 2)
    found = Called(steps=1, from_noise=True, to_image=True).velocity(network, noisy, TIMES, {})
    assert torch.equal(network.inputs["timestep"], 1 - TIMES)
    assert torch.equal(found, -2 * noisy)


def test_latents_go_in_and_come_back_in_the_layout_of_the_class() -> None:
    network, noisy = Network(), torch.randn(2, 4, 3, 2, 2)
    found = Called(layout=CHANNELS_LAST).velocity(network, noisy, TIMES, {})
    assert network.inputs["hidden_states"].shape == (2, 3, 2, 2, 4)
    assert torch.equal(found, 2 * noisy)


def test_masks_count_all_tokens_or_are_none_where_they_are_left_out() -> None:
    network, noisy, text = Network(), torch.randn(2, 4, 2, 2), torch.randn(2, 3, 6)
    masks = {"mask": "text", "mask_2": "text_2"}
    Called(masks=masks, needs_masks=True).velocity(network, noisy, TIMES, {"text": text})
    assert network.inputs["mask"].tolist() == [[True] * 3] * 2
    assert network.inputs["text"] is text
    assert "mask_2" not in network.inputs
    Called(masks=masks).velocity(network, noisy, TIMES, {"text": text})
    assert network.inputs["mask"] is None


def test_masks_are_boolean_and_one_without_any_token_counts_all() -> None:
    network, noisy = Network(), torch.randn(2, 4, 2, 2)
    given = {"text": torch.randn(2, 5, 3, 6), "mask": torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])}
    Called(masks={"mask": "text"}).velocity(network, noisy, TIMES, given)
    assert network.inputs["mask"].tolist() == [[True, True, False], [True, True, True]]
    Called(masks={"mask": "text"}, passes_masks=False).velocity(network, noisy, TIMES, given)
    assert "mask" not in network.inputs
    with pytest.raises(ValueError, match=r"^mask has the shape \[2, 5\]: it must be \[2, 3\], one for each token"):
        Called(masks={"mask": "text"}).velocity(network, noisy, TIMES, {**given, "mask": torch.ones(2, 5)})


def test_masks_are_taken_of_texts_that_are_taken() -> None:
    family = Called(sizes={"text": (3, "width"), "other": (3, "none")}, masks={"a": "text", "b": "other"})
    assert family.text_masks(CONFIG) == {"a": "text"}


def test_channels_beyond_those_that_are_returned_are_a_condition() -> None:
    config = {"in_channels": 12, "out_channels": 4, "control_channels": 6}
    family = Called(beside=2, layout=Patches((2, 1)), separate={"first_frame": "control_channels"})
    family.check(config)
    assert family.channels(config) == 2
    # Of 12 channels of patches of two latents, four are those of `noisy`.
    assert family.condition_shapes(config) == {"other_latents": (4, None, None), "first_frame": (6, None, None)}
    network, noisy, other = Network(), torch.randn(2, 4, 2, 2), torch.randn(2, 3, 2, 2)
    Called(beside=2).velocity(network, noisy, TIMES, {"other_latents": other})
    assert torch.equal(network.inputs["hidden_states"], torch.cat([noisy, other], dim=1))
    assert "other_latents" not in network.inputs


def test_half_of_the_output_is_left_out_where_it_may_be_a_variance() -> None:
    twice = SimpleNamespace(config=CONFIG)
    noisy = torch.randn(2, 4, 2, 2)
    network = lambda **inputs: (torch.cat([noisy, noisy + 1], dim=1),)  # noqa: E731
    network.config = twice.config
    assert torch.equal(Called(variance=True).velocity(network, noisy, TIMES, {}), noisy)


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        (Called(), {"out_channels": 8}, "out_channels=8: the model must return as many channels as it takes, 4"),
        (Called(variance=True), {"out_channels": 6}, "out_channels=6: the model must return"),
        (Called(required={"width": 3}), {}, "width=6: only width=3 is supported"),
        (Called(layout=Patches((3, 3))), {}, "in_channels=4: must be a multiple of 9, one patch"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(family: Called, config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family.check({**CONFIG, **config})


def test_twice_the_channels_are_taken_where_half_is_a_variance() -> None:
    Called(variance=True).check({**CONFIG, "out_channels": 8})


def test_sizes_of_squares() -> None:
    assert square(3, None) is None
    assert square(3, 8) == (3, 8, 8)
    assert square(3, [8, 4]) == (3, 8, 4)


def test_the_first_value_that_differs_is_named() -> None:
    with pytest.raises(ValueError, match="width=6: only width=1"):
        require(CONFIG, in_channels=4, width=1, side=9)
