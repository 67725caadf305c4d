"""Gradients are cut into buckets."""

from __future__ import annotations

import torch
from torch import nn

from training.parallel.buckets import buckets, exchange_bytes


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(size, dtype=dtype, device="meta")) for size in sizes]


def test_buckets_are_full_and_a_large_gradient_is_alone():
    given = parameters(2, 2, 9, 1, 1)
    assert [[p.numel() for p in bucket] for bucket in buckets(given, nbytes=16)] == [[2, 2], [9], [1, 1]]


def test_a_bucket_has_one_dtype():
    given = parameters(1) + parameters(1, dtype=torch.bfloat16)
    assert [len(bucket) for bucket in buckets(given)] == [1, 1]


def test_the_exchange_takes_two_of_the_largest_bucket():
    assert exchange_bytes(parameters(3, 10_000_000)) == 2 * 4 * 10_000_000
    assert exchange_bytes([]) == 0
