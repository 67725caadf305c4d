"""Rows of text that several processes compute together (DeepSpeed-Ulysses; Jacobs et al. 2023).

Each rank has the same rows, and of every row a run of positions. All layers but attention compute positions one by one.
Before attention the ranks exchange parts, after which each has all positions of a run of heads; behind it they exchange
these back. So attention is computed by the kernel of one device, and each rank sends 1/count of what it has to each
other one, four times a layer, and four times again in backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class DividedSequence:
    """Divides rows over `count` ranks, of which this one has the run of positions number `rank`.

    Until it is connected it is a plan's: of tensors of the meta device nothing is exchanged, but `planned(nbytes)` gets
    the bytes of each that would be.
    """

    def __init__(self, count: int):
        self.count, self.rank = count, 0
        self._exchange: Callable[[Tensor, Tensor], None] | None = None
        self.planned: Callable[[int], None] = lambda nbytes: None

    def connect(self, rank: int, exchange: Callable[[Tensor, Tensor], None]) -> None:
        """Connects it with the other ranks.

        `exchange(received, sent)` takes contiguous tensors of the same shape and dtype, whose first dimension is
        `count`: `received[k]` becomes `sent[rank]` of rank k. All ranks call it in the same order.
        """
        self.rank, self._exchange = rank, exchange

    def start(self, length: int) -> int:
        """Returns the position in the whole row of this rank's first one, where each rank has `length` of a row."""
        return self.rank * length

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Returns causal attention over whole rows, [batch, length, heads, head_dim], of this rank's positions.

        Args:
            query: [batch, heads, length, head_dim].
            key, value: the same, or with fewer heads, each for a group of query heads.
            attend: computes it of whole rows and a part of the heads: [batch, heads / count, count * length, head_dim],
                from tensors of that shape, whose memory is in another order.

        Raises ValueError for a number of heads that `count` does not divide.
        """
        for heads, what in ((query.shape[1], "attention heads"), (key.shape[1], "heads of keys and values")):
            if heads % self.count:
                raise ValueError(f"{heads} {what} do not divide by {self.count}")
        of_heads = (_Exchanged.apply(x.transpose(1, 2), self, True).transpose(1, 2) for x in (query, key, value))
        return _Exchanged.apply(attend(*of_heads).transpose(1, 2), self, False)

    def whole_rows(self, x: Tensor) -> Tensor:
        """Exchanges positions for heads: [batch, length, heads, d] -> [batch, count * length, heads / count, d].

        The result is in memory of the order [positions, batch, heads, d], of which received parts are runs.
        """
        batch, length, heads, size = x.shape
        parts = x.reshape(batch, length, self.count, heads // self.count, size).permute(2, 1, 0, 3, 4)
        return self._exchanged(parts).flatten(0, 1).transpose(0, 1)

    def whole_heads(self, x: Tensor) -> Tensor:
        """Does the reverse: [batch, count * length, heads / count, d] -> [batch, length, heads, d], contiguous."""
        parts = x.transpose(0, 1).unflatten(0, (self.count, -1))
        return self._exchanged(parts).permute(2, 1, 0, 3, 4).flatten(2, 3)

    def _exchanged(self, parts: Tensor) -> Tensor:
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        if sent.is_meta:
            self.planned(sent.nbytes)
        else:
            self._exchange(received, sent)
        return received


class _Exchanged(torch.autograd.Function):
    """`whole_rows` or `whole_heads`; the gradient of the one is the other."""

    @staticmethod
    def forward(ctx, x: Tensor, divided: DividedSequence, to_rows: bool) -> Tensor:
        ctx.divided, ctx.to_rows = divided, to_rows
        return divided.whole_rows(x) if to_rows else divided.whole_heads(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Exchanged.apply(grad, ctx.divided, not ctx.to_rows), None, None
