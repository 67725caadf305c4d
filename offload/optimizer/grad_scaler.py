"""What torch.amp.GradScaler tells an optimizer that takes the scale into its own update."""

from __future__ import annotations

import torch


def scaler_factor(optimizer: torch.optim.Optimizer) -> float | None:
    """Returns the factor that undoes the scale of the gradients, 1.0 without a scaler; None to leave the step out.

    A GradScaler sets `grad_scale`, None where it has changed the gradients itself (`unscale_`), and `found_inf`, not 0
    where a gradient is not finite.
    """
    if getattr(optimizer, "found_inf", 0):
        return None
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1.0 / float(scale)
