"""What one training step computes: gradients by microbatch, and their norm."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn


def forward_backward(mode, model: nn.Module, batch: Tensor, microbatches: int, seed: int, step: int) -> Tensor:
    """Gradients of the mean loss over `batch` (int64 [sequences, seq_len + 1], on the model's device).

    It is computed in `microbatches`, each weighing as its share of the sequences, so the sum does not depend on how
    the batch is split, also where `microbatches` does not divide it; `mode` says in which order they go. Each draws
    its random numbers (dropout) from a seed of its own, so that they do not depend on that order either. Returns the
    loss, a float32 scalar.
    """

    def loss_of(index: int, tokens: Tensor) -> Tensor:
        torch.manual_seed(microbatch_seed(seed, step, index))
        return model(tokens[:, :-1], tokens[:, 1:]) * (len(tokens) / len(batch))

    parts = batch.tensor_split(microbatches)
    losses = mode.accumulate([partial(loss_of, index, tokens) for index, tokens in enumerate(parts)])
    return torch.stack([loss.float() for loss in losses]).sum()


def microbatch_seed(seed: int, step: int, index: int) -> int:
    """A seed for the random numbers of one microbatch: the same in every run, another for every microbatch."""
    digest = hashlib.blake2b(f"{seed} {step} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def gradient_norm(model: nn.Module, known: Mapping[nn.Parameter, Tensor]) -> float:
    """The L2 norm of all gradients, of which the norms of some may be `known`.

    It is float32 whatever the gradients are (torch's own is as coarse as they are). Waits for the device.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norms = [known.get(parameter) for parameter in parameters]
    norms = [
        torch.linalg.vector_norm(parameter.grad, dtype=torch.float32) if norm is None else norm
        for parameter, norm in zip(parameters, norms, strict=True)
    ]
    # On the device where there is one, so that the sum is made alike in every mode.
    device = next((norm.device for norm in norms if norm.is_cuda), torch.device("cpu"))
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms])).item()


def clip_scale(norm: float, clip_norm: float | None) -> float:
    """What gradients of that norm are to be multiplied with so that it is at most `clip_norm`."""
    return 1.0 if clip_norm is None else min(clip_norm / (norm + 1e-6), 1.0)
