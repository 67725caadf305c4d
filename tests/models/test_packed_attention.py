"""Attention in packed rows, compared with each sample's alone."""

import pytest
import torch
import torch.nn.functional as F

from models.diffusion import build_diffusion
from models.hf import build_hf
from models.packed_attention import attention_by_starts, bounds_of, has_kernel, packed_attention, positions_in
from tests.models.helpers.packed import counted

SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, -1], [0, 1, 1, 1, 1, 1, 1, 1]])
WITHOUT_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def heads(dtype: torch.dtype = torch.float32, device: str = "cpu", head_dim: int = 8) -> list[torch.Tensor]:
    """Queries of 4 heads, keys and values of 2."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*SEGMENTS.shape, count, head_dim) for count in (4, 2, 2)]
    made = [torch.randn(shape, generator=generator).to(device, dtype).transpose(1, 2) for shape in shapes]
    return [tensor.requires_grad_() for tensor in made]


def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(query)
    for row, segments in enumerate(SEGMENTS):
        for number in segments.unique():
            here = segments == number
            one = (x[row : row + 1, :, here] for x in (query, key, value))
            result[row, :, here] = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0]
    return result


def with_gradients(result: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, result.numel(), device=result.device, dtype=result.dtype).view(result.shape)
    return [result.detach(), *torch.autograd.grad((result * weights).sum(), inputs)]


def test_positions_begin_again_in_each_sample():
    assert positions_in(SEGMENTS).tolist() == [[0, 1, 2, 0, 1, 0, 1, 0], [0, 0, 1, 2, 3, 4, 5, 6]]


def test_samples_are_counted_over_all_rows():
    assert counted(SEGMENTS).starts.tolist() == [0, 3, 5, 7, 8, 9, 16]


def test_a_mask_bounds_each_sample():
    inputs = heads()
    bounds = bounds_of(SEGMENTS, inputs[0])
    assert (bounds.dtype, tuple(bounds.shape)) == (torch.bool, (2, 1, 8, 8))
    found = with_gradients(packed_attention(*inputs, bounds), inputs)
    for one, other in zip(found, with_gradients(alone(*inputs), inputs), strict=True):
        torch.testing.assert_close(one, other)


def test_a_plan_makes_no_mask_where_a_gpu_has_a_kernel():
    query, key, value = (tensor.to("meta") for tensor in heads(torch.bfloat16))
    assert bounds_of(SEGMENTS.to("meta"), query) is None
    assert packed_attention(query, key, value, None).shape == query.shape
    assert bounds_of(SEGMENTS.to("meta"), query.float()).shape == (2, 1, 8, 8)


def test_rows_of_one_sample_each_are_those_of_a_model_that_packs_nothing():
    inputs = heads()
    starts = counted(torch.zeros_like(SEGMENTS)).starts
    found = with_gradients(attention_by_starts(*inputs, starts, scale=0.5), inputs)
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.5, enable_gqa=True)
    for one, other in zip(found, with_gradients(expected, inputs), strict=True):
        assert torch.equal(one, other)


def test_a_cpu_has_no_kernel():
    query, _, value = heads(torch.bfloat16)
    assert not has_kernel(query, value)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.gpu
@WITHOUT_CUDA
def test_the_kernel_bounds_each_sample(dtype: torch.dtype, window: int | None):
    inputs = heads(dtype, "cuda", head_dim=64)
    starts = bounds_of(counted(SEGMENTS, "cuda"), inputs[0])
    assert starts.dtype == torch.int32
    assert has_kernel(inputs[0], inputs[2])
    found = with_gradients(attention_by_starts(*inputs, starts, window=window), inputs)
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in inputs]
    mask = bounds_of(SEGMENTS, exact[0])
    if window is not None:
        mask = mask & torch.ones(8, 8, dtype=torch.bool).triu(1 - window)
    expected = with_gradients(packed_attention(*exact, mask), exact)
    for one, other in zip(found, expected, strict=True):
        assert (one.double().cpu() - other).norm() < 0.01 * other.norm()


@pytest.mark.gpu
@WITHOUT_CUDA
def test_the_host_does_not_wait_for_the_device():
    query, key, value = heads(torch.bfloat16, "cuda", head_dim=64)
    segments = counted(SEGMENTS, "cuda")
    packed_attention(query, key, value, bounds_of(segments, query)).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        positions_in(segments)
        packed_attention(query, key, value, bounds_of(segments, query)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


SMALL_FLUX = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "joint_attention_dim": 64}


@pytest.fixture
def cudnn_allowed():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.usefixtures("cudnn_allowed")
@pytest.mark.parametrize(
    "build",
    [lambda: build_diffusion("flux", SMALL_FLUX), lambda: build_hf("gpt2", "causal_lm", {"n_layer": 1})],
    ids=["diffusers", "transformers"],
)
def test_models_of_other_libraries_do_without_cudnns_attention(build):
    with torch.device("meta"):
        build()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
@WITHOUT_CUDA
def test_flux_has_gradients():
    with torch.device("cuda"):
        model = build_diffusion("flux", SMALL_FLUX).bfloat16()
        condition = {name: torch.randn(2, *shape) for name, shape in model.condition_shapes.items() if len(shape) < 2}
        condition["encoder_hidden_states"] = torch.randn(2, 512, 64)
        velocity = model(torch.randn(2, 16, 64, 64), torch.rand(2), **condition)
    velocity.float().square().mean().backward()
    torch.cuda.synchronize()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
