"""The L2 norm of a gradient, wherever it is.

torch's norm on the CPU adds all squares in a few float32 sums, to which the last of many millions are too small: of 45
million numbers the norm is 0.3% too small, of 131 million 1.6%. Clipping would differ by as much between gradients on
the host and on a device, whose norm is a tree of sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Numbers in a sum: the norm of so many is right to 1e-5.
PIECE = 1 << 12


def l2_norm(tensor: Tensor) -> Tensor:
    """Returns the L2 norm of a tensor of any shape and floating dtype: a float32 scalar on its device.

    On the CPU it is the norm of the norms of pieces, so it is right to 1e-5 for any number of elements.
    """
    tensor = tensor.detach()
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    if tensor.device.type != "cpu" or tensor.numel() <= PIECE:
        return torch.linalg.vector_norm(tensor, dtype=dtype).float()
    flat = tensor.contiguous().view(-1)
    whole = flat.numel() // PIECE * PIECE
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, PIECE), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    return torch.linalg.vector_norm(torch.cat([norms, rest.view(1)])).float()
