"""Packed rows of three samples each, and the losses of each sample alone."""

import torch
from torch import Tensor, nn

from models.packed_attention import starts_in

SEGMENTS = torch.tensor([[0] * 4 + [1] * 5 + [2] * 2 + [-1], [0] * 3 + [1] + [2] * 8])
VOCABULARY = 40


def counted(segments: Tensor, device: str = "cpu") -> Tensor:
    """The segments on `device`, with their starts, as a run has them."""
    moved = segments.to(device, copy=True)
    moved.starts = starts_in(segments).to(device)
    return moved


def packed_batch() -> tuple[Tensor, Tensor]:
    """Ids and labels [2, 12]; some labels, and those of padding, are not trained."""
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(3, VOCABULARY, SEGMENTS.shape, generator=generator) for _ in range(2))
    labels[0, 1] = labels[1, 5] = -100
    return ids, labels.masked_fill(SEGMENTS < 0, -100)


def losses_alone(model: nn.Module) -> Tensor:
    """Each position's loss [2, 12], computed with each sample in a row of its own."""
    ids, labels = packed_batch()
    losses = torch.zeros(SEGMENTS.shape)
    for row, segments in enumerate(SEGMENTS):
        for number in range(3):
            here = segments == number
            losses[row, here] = model(ids[row : row + 1, here], labels[row : row + 1, here], reduction="none")[0]
    return losses


def far_from_uniform(model: nn.Module) -> nn.Module:
    """Makes matrices larger than a new model's, so that positions that see each other tell."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8 if parameter.std() < 0.05 else 1.5)
    return model.eval()
