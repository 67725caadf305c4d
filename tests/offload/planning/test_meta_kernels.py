"""Attention and RMS norm of meta tensors save what fused kernels save; real tensors are not affected."""

import pytest
import torch
import torch.nn.functional as F

from offload.planning.memory_tracker import MemoryTracker
from offload.planning.meta_kernels import fused_kernels


def meta(*shape: int, **options) -> torch.Tensor:
    return torch.empty(*shape, device="meta", **options)


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


def saved_bytes(device: str, dtype: torch.dtype, *masks: torch.Tensor, **options: object) -> int:
    """Bytes that attention of 4 heads of 32 tokens saves for backward, each tensor once."""
    query = torch.ones(2, 4, 32, 8, device=device, dtype=dtype, requires_grad=True)
    storages = {}
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: storages.setdefault(id(t), t), lambda t: t)
    with fused_kernels(lambda flops, kind=None: None, on_gpu=False), hooks:
        F.scaled_dot_product_attention(query, query, query, *(mask.to(device) for mask in masks), **options)
    return sum(tensor.nbytes for tensor in storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_dropout_saves_its_scores_on_the_cpu(dtype: torch.dtype):
    scores = 2 * 4 * 32 * 32 * dtype.itemsize
    dropped = {"dropout_p": 0.1, "is_causal": True}
    assert saved_bytes("meta", dtype, **dropped) == saved_bytes("cpu", dtype, **dropped) > scores


@pytest.mark.parametrize(("heads", "shared"), [(8, 0), (2, 2)])
@pytest.mark.parametrize(("dtype", "on_gpu"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)])
def test_backward_in_half_precision_on_a_gpu_takes_more_for_a_while(dtype, on_gpu: bool, heads: int, shared: int):
    """In float32 a sum for the query; of shared keys and values gradients for each head that shares them."""
    tracker = MemoryTracker()
    query, key, value = (meta(1, n, 256, 64, dtype=dtype, requires_grad=True) for n in (8, heads, heads))
    with fused_kernels(tracker.add_flops, on_gpu), tracker.recording():
        result = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared > 0)
        grad = torch.empty_like(result)
        before = tracker.live_bytes
        result.backward(grad)
    gradients = query.nbytes + key.nbytes + value.nbytes
    scratch = (4 * query.numel() + shared * query.nbytes) * (on_gpu and dtype == torch.bfloat16)
    assert tracker.peak_bytes - before == gradients + scratch
    assert tracker.live_bytes <= before + gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_saves_a_mask_as_numbers(dtype: torch.dtype):
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool).tril()
    without = saved_bytes("meta", dtype, is_causal=True)
    assert without == saved_bytes("cpu", dtype, is_causal=True)
    for given in (mask, mask.to(dtype)):
        assert (
            saved_bytes("meta", dtype, given) == saved_bytes("cpu", dtype, given) == without + 32 * 32 * dtype.itemsize
        )


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_experts_save_their_factors(dtype: torch.dtype):
    tracker = MemoryTracker()
    rows = meta(128, 16, dtype=dtype, requires_grad=True)
    # As transformers calls it: a view of weights [experts, out, in].
    weights = meta(3, 4, 16, dtype=dtype, requires_grad=True)
    ends = meta(3, dtype=torch.int32)
    with fused_kernels(tracker.add_flops), tracker.recording():
        before = tracker.live_bytes
        product = F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
        assert (product.shape, product.dtype) == ((128, 4), dtype)
        assert tracker.live_bytes - before == product.nbytes
        assert tracker.flops == 2 * 128 * 16 * 4
        product.sum().backward()
    assert tracker.flops == tracker.flops_of["grouped"] == 6 * 128 * 16 * 4
    assert (rows.grad.shape, weights.grad.shape) == ((128, 16), (3, 4, 16))


def test_real_tensors_are_not_affected():
    query = torch.randn(1, 2, 8, 4)
    expected, normed = F.scaled_dot_product_attention(query, query, query), F.rms_norm(query, (4,))
    functions = F.scaled_dot_product_attention, F.rms_norm, torch.addmm, F.grouped_mm
    with fused_kernels(lambda count, kind=None: pytest.fail("counted")):
        assert torch.equal(F.scaled_dot_product_attention(query, query, query), expected)
        assert torch.equal(F.rms_norm(query, (4,)), normed)
        # The kernel wants rows of 16 bytes.
        weights = torch.eye(4).repeat(2, 1, 1)
        grouped = F.grouped_mm(torch.ones(2, 4), weights, offs=torch.tensor([1, 2], dtype=torch.int32))
        assert grouped.tolist() == [[1] * 4] * 2
        assert torch.addmm(torch.ones(2), torch.eye(2), torch.eye(2)).tolist() == [[2, 1], [1, 2]]
    with pytest.raises(ArithmeticError), fused_kernels(lambda count, kind=None: None):
        raise ArithmeticError
    assert (F.scaled_dot_product_attention, F.rms_norm, torch.addmm, F.grouped_mm) == functions


def test_rms_norm_of_the_cpu_is_that_of_torch():
    names = {}
    for on_gpu in (True, False):
        with fused_kernels(lambda count, kind=None: None, on_gpu):
            names[on_gpu] = F.rms_norm(meta(4, 128, requires_grad=True), (128,)).grad_fn.name()
    assert names == {
        True: "_RMSNormBackward",
        False: F.rms_norm(meta(4, 128, requires_grad=True), (128,)).grad_fn.name(),
    }


SHAPES = {
    "equal": ((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 3), None, False),
    "grouped heads": ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8), None, True),
    "heads that are repeated": ((2, 4, 5, 8), (2, 1, 6, 8), (1, 1, 6, 8), (5, 6), False),
    "no heads": ((5, 8), (6, 8), (6, 8), None, False),
    "other heads": ((2, 4, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8), None, False),
    "groups that do not divide the heads": ((2, 4, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8), None, True),
    "another width": ((2, 4, 5, 8), (2, 4, 6, 7), (2, 4, 6, 8), None, False),
    "a mask of another length": ((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8), (5, 7), False),
}


@pytest.mark.parametrize("case", SHAPES)
def test_attention_takes_the_shapes_that_torchs_takes(case: str):
    *shapes, mask, grouped = SHAPES[case]

    def refused(device: str) -> bool:
        given = [torch.zeros(shape, device=device) for shape in shapes]
        others = {"attn_mask": None if mask is None else torch.zeros(mask, device=device), "enable_gqa": grouped}
        try:
            F.scaled_dot_product_attention(*given, **others)
        except RuntimeError:
            return True
        return False

    with fused_kernels(lambda flops, kind=None: None):
        assert refused("meta") == refused("cpu")
