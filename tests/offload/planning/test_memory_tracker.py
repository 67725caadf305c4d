"""The tracker: live bytes, their peak and FLOPs of meta tensors, with attention as fused kernels compute it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from offload.planning.memory_tracker import MemoryTracker
from offload.planning.meta_kernels import fused_kernels

MIB = 2**20


def meta(*shape: int, **options) -> torch.Tensor:
    return torch.empty(*shape, device="meta", **options)


def test_what_is_alive_and_was_at_most():
    tracker = MemoryTracker()
    with tracker.recording():
        first = meta(MIB, dtype=torch.uint8)
        second = first + 1
        view = second[::2]
        assert (tracker.live_bytes, tracker.peak_bytes) == (2 * MIB, 2 * MIB)
        del second
        assert tracker.live_bytes == 2 * MIB, "a view keeps the memory"
        del view, first
        assert (tracker.live_bytes, tracker.peak_bytes) == (0, 2 * MIB)
        tracker.start_step()
        meta(1)
    assert tracker.peak_bytes == 512, "in pieces as the allocator hands them out"


def test_what_was_there_before_is_not_counted():
    weight, tracker = meta(1024, 1024, requires_grad=True), MemoryTracker()
    with tracker.recording(), tracker.recording():
        (weight.t() * 1).detach_().add_(1)
        assert tracker.peak_bytes == weight.nbytes
        weight.add(0)
    assert tracker.live_bytes == 0


def test_products_are_counted_forward_and_backward():
    tracker = MemoryTracker()
    layer = torch.nn.Linear(32, 64, device="meta")
    with tracker.recording():
        layer(meta(10, 32, requires_grad=True)).sum().backward()
    assert tracker.flops == 3 * 2 * 10 * 32 * 64


@pytest.mark.parametrize("causal", [False, True])
def test_attention_saves_no_matrix_of_scores(causal: bool):
    tracker = MemoryTracker()
    query, key, value = (meta(2, heads, 256, 64, requires_grad=True) for heads in (8, 4, 4))
    with fused_kernels(tracker.add_flops), tracker.recording():
        result = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
        assert result.shape == query.shape
        assert tracker.live_bytes == result.nbytes + 2 * 8 * 256 * 4
        assert tracker.flops == 4 * query.numel() * 256 * (0.5 if causal else 1)
        result.sum().backward()
    assert tracker.flops == 12 * query.numel() * 256 * (0.5 if causal else 1)
    assert key.grad.shape == key.shape


def test_rms_norm_saves_its_input_and_a_number_a_row():
    tracker = MemoryTracker()
    norm, hidden = torch.nn.RMSNorm(128, device="meta"), meta(4, 16, 128, requires_grad=True)
    with fused_kernels(tracker.add_flops), tracker.recording():
        normed = norm(hidden)
        assert tracker.live_bytes == normed.nbytes + 512
        normed.sum().backward()
    assert norm.weight.grad.shape == (128,)


def test_a_product_added_to_a_wider_result_takes_no_memory():
    tracker, total = MemoryTracker(), meta(8, 4)
    with fused_kernels(tracker.add_flops), tracker.recording():
        a, b = meta(8, 16, dtype=torch.bfloat16), meta(16, 4, dtype=torch.bfloat16)
        before = tracker.live_bytes
        assert torch.addmm(total, a, b, out_dtype=torch.float32, out=total) is total
    assert (tracker.peak_bytes, tracker.flops) == (before, 2 * 8 * 16 * 4)


def test_real_tensors_notice_nothing():
    query = torch.randn(1, 2, 8, 4)
    expected, normed = F.scaled_dot_product_attention(query, query, query), F.rms_norm(query, (4,))
    functions = F.scaled_dot_product_attention, F.rms_norm, torch.addmm
    with fused_kernels(lambda count: pytest.fail("counted")):
        assert torch.equal(F.scaled_dot_product_attention(query, query, query), expected)
        assert torch.equal(F.rms_norm(query, (4,)), normed)
        assert torch.addmm(torch.ones(2), torch.eye(2), torch.eye(2)).tolist() == [[2, 1], [1, 2]]
    assert (F.scaled_dot_product_attention, F.rms_norm, torch.addmm) == functions
