"""Rates of products are measured on any device, and the work of a block is counted without values."""

import pytest
import torch

from training.profiling.products import attention_flops_per_s, block_work, grouped_flops_per_s

CPU = torch.device("cpu")


def test_the_work_of_a_block_is_counted_without_values():
    """Those of its 200 M weights take two seconds, and each start on a GPU makes a plan."""
    before = torch.get_rng_state()
    block_work.__wrapped__("cuda", torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before)


def test_products_of_experts_are_measured():
    assert 1e6 < grouped_flops_per_s(CPU) < 1e14


def test_attention_is_measured():
    assert 1e6 < attention_flops_per_s(CPU) < 1e14


@pytest.mark.gpu
def test_attention_over_long_rows_takes_the_faster_kernel(monkeypatch: pytest.MonkeyPatch):
    """By its name: beside other programs on the card its rate is no longer its own."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("cuDNN's kernel is taken on Hopper alone")
    names, grad = set(), torch.autograd.grad

    def noting(result: torch.Tensor, *given: object) -> tuple[torch.Tensor, ...]:
        names.add(type(result.grad_fn).__name__)
        return grad(result, *given)

    monkeypatch.setattr(torch.autograd, "grad", noting)
    assert attention_flops_per_s(torch.device("cuda")) > 0
    assert names == {"ScaledDotProductCudnnAttentionBackward0"}
