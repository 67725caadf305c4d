"""AdamW on the parameters where they live, with float32 masters for those of lower precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from offload.host_optimizer import HostAdamW


class AdamW(HostAdamW):
    """torch's fused AdamW on host and device parameters, mixed in one model, all of them updated in `step`.

    Masters, states and their layout are those of `HostAdamW`; scratch is one tile of float32 gradient, never a whole
    model's.

    Args:
        params: parameters or groups of them, as for any torch optimizer.
        lr, betas, eps, weight_decay: as torch.optim.AdamW; a group may have its own, and a scheduler may change them.
        decay_norms_and_biases: False leaves parameters of fewer than two dimensions without weight decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Iterable[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decay_norms_and_biases: bool = True,
    ):
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decay_norms_and_biases=decay_norms_and_biases,
            threads=torch.get_num_threads(),
            compile="off",
        )
