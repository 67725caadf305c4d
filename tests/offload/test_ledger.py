"""The ledger: live bytes, their peak and FLOPs of meta tensors, with attention as fused kernels compute it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from offload.fused_kernels import fused_kernels
from offload.ledger import Ledger

MIB = 2**20


def meta(*shape: int, **options) -> torch.Tensor:
    return torch.empty(*shape, device="meta", **options)


def test_what_is_alive_and_was_at_most():
    ledger = Ledger()
    with ledger.recording():
        first = meta(MIB, dtype=torch.uint8)
        second = first + 1
        view = second[::2]
        assert (ledger.live_bytes, ledger.peak_bytes) == (2 * MIB, 2 * MIB)
        del second
        assert ledger.live_bytes == 2 * MIB, "a view keeps the memory"
        del view, first
        assert (ledger.live_bytes, ledger.peak_bytes) == (0, 2 * MIB)
        ledger.start_step()
        meta(1)
    assert ledger.peak_bytes == 512, "in pieces as the allocator hands them out"


def test_what_was_there_before_is_not_counted():
    weight, ledger = meta(1024, 1024, requires_grad=True), Ledger()
    with ledger.recording(), ledger.recording():
        (weight.t() * 1).detach_().add_(1)
        assert ledger.peak_bytes == weight.nbytes
        weight.add(0)
    assert ledger.live_bytes == 0


def test_products_are_counted_forward_and_backward():
    ledger = Ledger()
    layer = torch.nn.Linear(32, 64, device="meta")
    with ledger.recording():
        layer(meta(10, 32, requires_grad=True)).sum().backward()
    assert ledger.flops == 3 * 2 * 10 * 32 * 64


@pytest.mark.parametrize("causal", [False, True])
def test_attention_saves_no_matrix_of_scores(causal: bool):
    ledger = Ledger()
    query, key, value = (meta(2, heads, 256, 64, requires_grad=True) for heads in (8, 4, 4))
    with fused_kernels(ledger.add_flops), ledger.recording():
        result = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
        assert result.shape == query.shape
        assert ledger.live_bytes == result.nbytes + 2 * 8 * 256 * 4
        assert ledger.flops == 4 * query.numel() * 256 * (0.5 if causal else 1)
        result.sum().backward()
    assert ledger.flops == 12 * query.numel() * 256 * (0.5 if causal else 1)
    assert key.grad.shape == key.shape


def test_rms_norm_saves_its_input_and_a_number_a_row():
    ledger = Ledger()
    norm, hidden = torch.nn.RMSNorm(128, device="meta"), meta(4, 16, 128, requires_grad=True)
    with fused_kernels(ledger.add_flops), ledger.recording():
        normed = norm(hidden)
        assert ledger.live_bytes == normed.nbytes + 512
        normed.sum().backward()
    assert norm.weight.grad.shape == (128,)


def test_a_product_added_to_a_wider_result_takes_no_memory():
    ledger, total = Ledger(), meta(8, 4)
    with fused_kernels(ledger.add_flops), ledger.recording():
        a, b = meta(8, 16, dtype=torch.bfloat16), meta(16, 4, dtype=torch.bfloat16)
        before = ledger.live_bytes
        assert torch.addmm(total, a, b, out_dtype=torch.float32, out=total) is total
    assert (ledger.peak_bytes, ledger.flops) == (before, 2 * 8 * 16 * 4)


def test_real_tensors_notice_nothing():
    query = torch.randn(1, 2, 8, 4)
    expected, normed = F.scaled_dot_product_attention(query, query, query), F.rms_norm(query, (4,))
    functions = F.scaled_dot_product_attention, F.rms_norm, torch.addmm
    with fused_kernels(lambda count: pytest.fail("counted")):
        assert torch.equal(F.scaled_dot_product_attention(query, query, query), expected)
        assert torch.equal(F.rms_norm(query, (4,)), normed)
        assert torch.addmm(torch.ones(2), torch.eye(2), torch.eye(2)).tolist() == [[2, 1], [1, 2]]
    assert (F.scaled_dot_product_attention, F.rms_norm, torch.addmm) == functions
