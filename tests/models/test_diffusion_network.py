"""Networks of every class of diffusers: built without weights, and under a mode."""

from __future__ import annotations

import diffusers
import pytest
import torch

from models.library_dtypes import default_dtype
from tests.models.helpers.small_diffusion import OWN, SMALL, TIMES, build, inputs_of, small
from tests.offload.helpers.architecture_cases import MODES
from tests.offload.helpers.foreign import same_as_resident

# Frames, sizes of the image, and texts of several layers: in every run of the tests.
OFTEN = ("cogvideox_image", "pixart", "krea2")
CLASSES = [pytest.param(name, marks=() if name in (*OWN, *OFTEN) else pytest.mark.slow) for name in SMALL]
# Each class meets one of them.
USED = ("bounce_linear", "layer_stream", "shard_offload", "layer_stream_swap")
CASES = [
    pytest.param(name, USED[number % len(USED)], marks=() if name in OFTEN else pytest.mark.slow)
    for number, name in enumerate(SMALL)
]


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


@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.usefixtures("small_activations")
def test_a_mode_computes_the_numbers_of_the_resident_model(name: str, mode: str) -> None:
    """In bf16, beside which some classes keep weights in float32."""
    with default_dtype(torch.bfloat16):
        model = small(name).train()
    noisy, condition = inputs_of(name)
    make, microbatches = MODES[mode]
    assert same_as_resident(model, make(), [((noisy, TIMES), condition)] * 2, microbatches).h2d_bytes


def test_a_library_that_only_the_forward_needs_is_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusers.utils.is_torchvision_available", lambda: False)
    with pytest.raises(ValueError, match=r"^CosmosTransformer3DModel .* with torchvision, .*: pip install torchvision"):
        build("cosmos", concat_padding_mask=True)
    assert build("cosmos").condition_shapes is None
