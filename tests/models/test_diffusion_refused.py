"""Classes of diffusers that do not fit the uniform call are refused with the reason, and the others are not."""

from __future__ import annotations

from fnmatch import fnmatchcase

import diffusers
import pytest

from models.diffusion import build_diffusion
from models.diffusion_families import FAMILIES
from models.diffusion_refused import REASONS, reason_against


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("AutoencoderKLWan", "it encodes or decodes images, sounds or videos"),
        ("FluxControlNetModel", "its output is added inside of another model"),
        ("LTX2VideoTransformer3DModel", "it makes a video and a sound at once"),
        ("OmniGenTransformer2DModel", "its text is token ids"),
        ("Cosmos3OmniTransformer", "it reads token ids"),
        ("HeliosTransformer3DModel", "it continues a video from frames in several sizes"),
        ("UNetControlNetXSModel", "it is two models in one"),
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
