"""What one training step computes: gradients by microbatch, and their norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offload.transfer import upload


def forward_backward(model: nn.Module, batch: Tensor, microbatches: int, device: torch.device) -> Tensor:
    """Gradients of the mean loss over `batch` (int64 [sequences, seq_len + 1]), microbatch by microbatch.

    Each microbatch weighs as its share of the sequences, so the sum does not depend on how the batch is split, also
    where `microbatches` does not divide it. Returns the loss, a float32 scalar on `device`.
    """
    total = torch.zeros((), dtype=torch.float32, device=device)
    for tokens in upload(batch, device).tensor_split(microbatches):
        loss = model(tokens[:, :-1], tokens[:, 1:]) * (len(tokens) / len(batch))
        loss.backward()
        total += loss.detach()
    return total


def gradient_norm(model: nn.Module, clip_norm: float | None, wanted: bool) -> Tensor | None:
    """Clips the gradients to `clip_norm` if that is given; the norm before clipping, None where nobody wants it."""
    if clip_norm is not None:
        return nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    if not wanted:
        return None
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
