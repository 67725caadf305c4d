"""Buckets of gradients, each of which is exchanged at once, as those of PyTorch DDP (Li et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

# As large as DDP's. A larger gradient has a bucket of its own.
BUCKET_BYTES = 25 * 2**20


def buckets(parameters: Sequence[nn.Parameter], nbytes: int = BUCKET_BYTES) -> Iterator[list[nn.Parameter]]:
    """Yields the parameters in runs of one dtype and at most `nbytes`; one that is larger is alone."""
    bucket: list[nn.Parameter] = []
    taken = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.dtype.itemsize
        if bucket and (taken + size > nbytes or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, taken = [], 0
        bucket.append(parameter)
        taken += size
    if bucket:
        yield bucket


def exchange_bytes(parameters: Sequence[nn.Parameter]) -> int:
    """Returns the bytes on the device in which gradients are exchanged: two of the largest bucket."""
    sizes = [sum(p.numel() * p.dtype.itemsize for p in bucket) for bucket in buckets(list(reversed(parameters)))]
    return 2 * max(sizes, default=0)
