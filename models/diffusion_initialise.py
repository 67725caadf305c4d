"""Initial values of the parameters of a diffusion model: its library's distributions, as a function of seed and name.

diffusers leaves layers as torch makes them, and draws from one generator in one order. Here the hash of
`models.initialise` gives the numbers. `Family.first_stds` has the layers that the paper of an architecture starts
otherwise: above all the modulation of adaLN-Zero and the last projection, which start at zero (Peebles and Xie 2023).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from models.built_again import Build, as_made
from models.initialise import Draws, check_initialisable
from models.quantise import values_of

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)


@torch.no_grad()
def initialise_diffusion(
    network: nn.Module,
    build: Build,
    first_stds: dict[str, float],
    seed: int,
    device: torch.device | str | None = None,
) -> None:
    """Fills every parameter in place, on its own device.

    * A layer whose name fits a pattern of `first_stds`: normal weights of that standard deviation, zeros for 0; its
      bias is zero. So is a parameter that has its own name there.
    * Linear and convolution layers, weight and bias: uniform within 1 / sqrt(fan_in), as torch's `reset_parameters`.
    * Tables: normal with standard deviation 1, zeros in the row of `padding_idx`. Norms: ones, and zeros for the bias.
    * Any other parameter (the norms of diffusers, tables of modulations): the value that its module is made with, on
      the CPU with torch's generator seeded by `seed`.

    Random numbers of layers and tables come from the hash of (seed, name, index): so a value depends neither on the
    order of filling nor on mode, device or dtype, but for rounding to it. Buffers are not changed. A weight in few bits
    is quantised from its own numbers, one at a time.

    Args:
        build: makes the same network again.
        device: where hashed numbers are computed before they are copied; by default the parameter's own device.

    Raises ValueError if a parameter is on the meta device or has no floating-point dtype, and nothing has been written
    then; or diffusers gives it no value.
    """
    check_initialisable(network.named_parameters())
    draws, others = Draws(seed, device), []
    for path, module in network.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{own}" if path else own
            fitting = (std for pattern, std in first_stds.items() if fnmatchcase(path, pattern) or name == pattern)
            std = next(fitting, None)
            if std is None and not isinstance(module, (nn.Linear, _ConvNd, nn.Embedding, *NORMS)):
                others.append(name)
                continue
            with values_of(parameter) as values:
                if std == 0 or (std is not None and own == "bias"):
                    values.zero_()
                elif std is not None:
                    draws.normal(values, name, std)
                else:
                    _fill_as_torch(values, name, own, module, draws)
    for name, value in as_made(network, build, others, seed):
        network.get_parameter(name).copy_(value)


def _fill_as_torch(values: Tensor, name: str, own: str, module: nn.Module, draws: Draws) -> None:
    """Fills the parameter `own` of a layer, table or norm as its `reset_parameters` does, with hashed numbers."""
    if isinstance(module, (nn.Linear, _ConvNd)):
        draws.uniform(values, name, module.weight.shape[1:].numel() ** -0.5)
    elif isinstance(module, nn.Embedding):
        draws.normal(values, name, 1.0)
        if module.padding_idx is not None:
            values[module.padding_idx].zero_()
    else:
        values.fill_(1.0 if own == "weight" else 0.0)
