from __future__ import annotations

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models.hf_packed_kernel import SDPA, STARTS, mask_of, starts_for
from models.packed_attention import bounds_of
from tests.models.helpers.packed import SEGMENTS, counted

STARTS_OF = counted(SEGMENTS).starts


def test_the_mask_is_that_of_the_segments():
    mask = mask_of(STARTS_OF, *SEGMENTS.shape, None)
    assert torch.equal(mask, bounds_of(SEGMENTS, torch.empty(1)))
    near = mask_of(STARTS_OF, *SEGMENTS.shape, 2)
    assert torch.equal(near, mask & torch.ones(12, 12, dtype=torch.bool).triu(-1))


def test_starts_are_for_kernels_of_gpus():
    assert starts_for(SEGMENTS, torch.bfloat16) is None
    assert starts_for(SEGMENTS.to("meta"), torch.float32) is None
    assert starts_for(SEGMENTS.to("meta"), torch.bfloat16).is_meta


def test_what_the_kernel_does_not_compute_is_computed_under_the_mask():
    """Here dropout, which leaves nothing of anything."""
    query = torch.ones(*SEGMENTS.shape, 1, 4).transpose(1, 2)
    attend = ALL_ATTENTION_FUNCTIONS[SDPA]
    plain, _ = attend(torch.nn.Module(), query, query, query, None, **{STARTS: STARTS_OF})
    dropped, _ = attend(torch.nn.Module(), query, query, query, None, dropout=1.0, **{STARTS: STARTS_OF})
    torch.testing.assert_close(plain, torch.ones(*SEGMENTS.shape, 1, 4))
    assert not dropped.any()


def test_without_starts_attention_is_that_of_transformers():
    query = torch.randn(2, 1, 5, 4)
    found, _ = ALL_ATTENTION_FUNCTIONS[SDPA](torch.nn.Module(), query, query, query, None)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert torch.equal(found, expected.transpose(1, 2))
