"""What classes of sounds refuse; `test_diffusion_families` compares their calls with those of their pipelines."""

from __future__ import annotations

import pytest

from models.diffusion import build_diffusion
from models.diffusion_sounds import SOUNDS
from tests.models.helpers.small_diffusion import SMALL


def test_other_widths_of_texts_are_refused() -> None:
    kind, options, _ = SMALL["audioldm2"]
    with pytest.raises(ValueError, match="cross_attention_dim=12: only three widths for each block are supported"):
        build_diffusion(kind, {**options, "cross_attention_dim": 12})


def test_what_a_song_continues_has_the_channels_that_are_no_latents() -> None:
    shapes = SOUNDS["AceStepTransformer1DModel"].condition_shapes(
        {"in_channels": 192, "audio_acoustic_hidden_dim": 64, "encoder_hidden_size": None, "hidden_size": 32}
    )
    assert shapes == {"encoder_hidden_states": (256, 32), "context_latents": (128, None)}
