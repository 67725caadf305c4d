"""The kernels that attention may use, and Flux on a GPU, where another kernel failed."""

from __future__ import annotations

import pytest
import torch

from models.diffusion import build_diffusion
from models.hf import build_hf

SMALL_FLUX = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "joint_attention_dim": 64}


@pytest.fixture(autouse=True)
def cudnn_allowed():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(
    "build",
    [
        lambda: build_diffusion("flux", SMALL_FLUX),
        lambda: build_hf("gpt2", "causal_lm", {"n_layer": 1}),
    ],
    ids=["diffusers", "transformers"],
)
def test_models_of_other_libraries_do_without_cudnns_attention(build):
    with torch.device("meta"):
        build()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flux_has_gradients():
    with torch.device("cuda"):
        model = build_diffusion("flux", SMALL_FLUX).bfloat16()
        condition = {name: torch.randn(2, *shape) for name, shape in model.condition_shapes.items() if len(shape) < 2}
        condition["encoder_hidden_states"] = torch.randn(2, 512, 64)
        velocity = model(torch.randn(2, 16, 64, 64), torch.rand(2), **condition)
    velocity.float().square().mean().backward()
    torch.cuda.synchronize()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
