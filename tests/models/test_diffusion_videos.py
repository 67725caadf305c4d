"""Conditions of classes of videos; `test_diffusion_families` compares their calls with those of their pipelines."""

from __future__ import annotations

from models.diffusion_videos import VIDEOS
from tests.models.helpers.small_diffusion import small


def test_a_control_video_has_channels_of_its_own() -> None:
    assert "WanVACETransformer3DModel" in VIDEOS
    assert small("wan_vace").condition_shapes["control_hidden_states"] == (5, None, None, None)
