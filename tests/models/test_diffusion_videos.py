"""Conditions of classes of videos and sounds; `test_diffusion_families` compares their calls with their pipelines'."""

from __future__ import annotations

from models.diffusion_videos import SOUNDS
from tests.models.helpers.small_diffusion import small


def test_a_control_video_has_channels_of_its_own() -> None:
    assert small("wan_vace").condition_shapes["control_hidden_states"] == (5, None, None, None)


def test_what_a_song_continues_has_the_channels_that_are_no_latents() -> None:
    shapes = SOUNDS["AceStepTransformer1DModel"].condition_shapes(
        {"in_channels": 192, "audio_acoustic_hidden_dim": 64, "encoder_hidden_size": None, "hidden_size": 32}
    )
    assert shapes == {"encoder_hidden_states": (256, 32), "context_latents": (128, None)}
