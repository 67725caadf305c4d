"""What one training step computes: gradients by microbatch, and their norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def forward_backward(model: nn.Module, batch: Tensor, microbatches: int) -> Tensor:
    """Gradients of the mean loss over `batch` (int64 [sequences, seq_len + 1], on the model's device).

    It runs microbatch by microbatch, each weighing as its share of the sequences, so the sum does not depend on how
    the batch is split, also where `microbatches` does not divide it. Returns the loss, a float32 scalar.
    """
    total = torch.zeros((), dtype=torch.float32, device=batch.device)
    for tokens in batch.tensor_split(microbatches):
        loss = model(tokens[:, :-1], tokens[:, 1:]) * (len(tokens) / len(batch))
        loss.backward()
        total += loss.detach()
    return total


def gradient_norm(model: nn.Module, clip_norm: float | None, wanted: bool) -> Tensor | None:
    """Clips the gradients to `clip_norm` if that is given; the norm before clipping, None where nobody wants it.

    The norm is float32 whatever the gradients are (torch's own is as coarse as they are), over host and device alike.
    """
    if clip_norm is None and not wanted:
        return None
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(parameter.grad, dtype=torch.float32) for parameter in parameters]
    norm = torch.linalg.vector_norm(torch.stack([part.to(norms[0].device) for part in norms]))
    if clip_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return norm
