"""Networks of every class of diffusers, built without weights."""

from __future__ import annotations

import diffusers
import pytest
import torch

from tests.models.helpers.small_diffusion import OWN, SMALL, build

OFTEN = (*OWN, "qwen", "krea2", "cogvideox_image")
CLASSES = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in SMALL]


@pytest.mark.parametrize("name", CLASSES)
def test_buffers_after_meta_are_those_of_the_cpu(name: str) -> None:
    with torch.device("meta"):
        model = build(name)
    model.to_empty(device="cpu").fill_buffers()
    kind, options, _ = SMALL[name]
    expected = dict(getattr(diffusers, kind)(**options).named_buffers())
    found = dict(model.network.named_buffers())
    assert found.keys() == expected.keys()
    for key, buffer in found.items():
        assert torch.equal(buffer, expected[key]), key


def test_a_library_that_only_the_forward_needs_is_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusers.utils.is_torchvision_available", lambda: False)
    with pytest.raises(ValueError, match=r"^CosmosTransformer3DModel .* with torchvision, .*: pip install torchvision"):
        build("cosmos", concat_padding_mask=True)
    assert build("cosmos").condition_shapes is None
