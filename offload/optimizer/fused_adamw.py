"""torch's fused kernel of AdamW, on the host with whole vectors alone.

torch rounds what is left behind the last whole vector of a tensor in another way: neither as the C loop does, nor as in
a longer range. Padded to a whole vector, it is rounded like the rest, whatever the length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offload.torch_private import torch_internals

# float32 elements of the longest vectors of a processor that torch uses.
VECTOR = 16
# The place of the gradients among the arguments.
GRADIENTS = 1


def fused_adamw_(
    masters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    **settings: Any,
) -> None:
    """Updates float32 masters and moments as the kernel under torch.optim.AdamW(fused=True).

    The tensors of one parameter are dense and lie alike in memory. `max_exp_avg_sqs` is empty.
    """
    values = masters, gradients, exp_avgs, exp_avg_sqs
    on_host = masters[0].device.type == "cpu"
    tails: list[_Tails] = []
    if on_host and any(master.numel() % VECTOR for master in masters):
        flat = [[tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors] for tensors in values]
        tails = [_Tails(tensors) for tensors in flat]
        heads = [
            [each[: len(each) - len(each) % VECTOR] for each in tensors if len(each) >= VECTOR] for tensors in flat
        ]
        of_heads = [step for step, each in zip(steps, flat[0], strict=True) if len(each) >= VECTOR]
        steps = of_heads + [step for step, each in zip(steps, flat[0], strict=True) if len(each) % VECTOR]
        values = [[*whole, *tail.padded] for whole, tail in zip(heads, tails, strict=True)]
    torch_internals.fused_adamw_(*values, max_exp_avg_sqs, steps, **settings)
    for number, tail in enumerate(tails):
        # A gradient is only read: a write would raise its version, as if somebody had changed it.
        if number != GRADIENTS:
            tail.write()


class _Tails:
    """What is left behind the last whole vectors of 1-D tensors: `padded` has a copy of each in a vector of its own."""

    def __init__(self, tensors: list[Tensor]):
        self._places = [tensor[len(tensor) - len(tensor) % VECTOR :] for tensor in tensors if len(tensor) % VECTOR]
        self.padded = list(torch.zeros(len(self._places), VECTOR))
        self._copies = [vector[: len(place)] for vector, place in zip(self.padded, self._places, strict=True)]
        torch_internals.copy_each(self._copies, self._places)

    def write(self) -> None:
        """Copies the values back."""
        torch_internals.copy_each(self._places, self._copies)
