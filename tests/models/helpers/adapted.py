"""Gives values to models with adapters, as a run does: the base, the adapters, and what training would change."""

import torch
from torch import nn

from models.adapters import initialise_adapters, root_of, without_adapters
from models.initialise import initialise


def fill_base(model: nn.Module) -> None:
    """Fills the base from seed 0."""
    with without_adapters(model):
        if hasattr(model, "fill_buffers"):
            model.fill_buffers()
        getattr(model, "initialise", lambda seed: initialise(model, seed))(0)


def with_memory(model: nn.Module, seed: int = 0) -> nn.Module:
    """Moves a model with new adapters from the meta device to the CPU, and fills it; adapters from `seed`."""
    model.to_empty(device="cpu")
    if hasattr(root_of(model), "tie_weights"):
        root_of(model).tie_weights()
    fill_base(model)
    initialise_adapters(model, seed)
    return model


@torch.no_grad()
def disturb(model: nn.Module, seed: int = 0) -> nn.Module:
    """Gives what trains other values, so that an adapter has an effect."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model
