"""The low-rank adapter of experts that are one tensor: peft's layer for `target_parameters`, in every offload mode.

peft adds A and B to the weight by a parametrisation, which takes the parameter out of its module for as long as the
forward runs. A mode has the parameter's stand-in there, and microbatches side by side find it missing. So the sum is a
plain attribute of the module meanwhile, which hides the parameter and leaves it where it is. The numbers are peft's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn


class ExpertsLora(ParamWrapper):
    """peft's adapter of one parameter [experts, out, in] or [experts, in, out], with one pair of A and B an expert.

    A forward makes the sum of weight and adapter for all experts, and backward keeps it: without a recompute each layer
    has a copy of its experts on the device until its backward.
    """

    @contextmanager
    def _activate_lora(self, active_adapters: Sequence[str]) -> Iterator[None]:
        """Gives the experts the sum in place of their weight inside the block."""
        module, name = self.get_base_layer(), self.parameter_name
        weight = self.get_param()
        for adapter in active_adapters:
            left, right, scale = self.get_delta_factors(adapter)
            # As in peft: a product in autocast's dtype would give the experts weights of another dtype.
            with torch.autocast(weight.device.type, enabled=False):
                weight = torch.baddbmm(weight, left, right, alpha=scale)
        vars(module)[name] = weight
        try:
            yield
        finally:
            del vars(module)[name]


def show_by_attribute(root: nn.Module) -> None:
    """Makes peft's layers for single parameters inside `root` those of this module, in place."""
    for module in root.modules():
        if type(module) is ParamWrapper:
            module.__class__ = ExpertsLora
