"""Counts the updates of torch's fused optimizers, whose kernels do not advance autograd's version counters.

Inside a step, a weight that was changed is copied to the device again: an optimizer whose `step` is there, too
(LBFGS, an update after each microbatch), has to show that it has changed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


@contextmanager
def counting_fused_updates() -> Iterator[None]:
    """Surrounds code in which the `step` of a fused optimizer advances the version counters of its parameters."""
    handle = register_optimizer_step_post_hook(_count)
    try:
        yield
    finally:
        handle.remove()


def _count(optimizer: Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        if group.get("fused"):
            for parameter in group["params"]:
                if parameter.grad is not None and not parameter.is_inference():
                    torch.autograd.graph.increment_version(parameter)
