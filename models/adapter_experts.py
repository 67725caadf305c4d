"""The low-rank adapter of experts that are one tensor: peft's layer for `target_parameters`, in every offload mode.

peft adds A and B to the weight by a parametrisation, which takes the parameter out of its module for as long as the
forward runs. A mode has the parameter's stand-in there, and microbatches side by side find it missing. So the sum is a
plain attribute of the module meanwhile, which hides the parameter and leaves it where it is. The numbers are peft's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from models.expert_layout import for_each_expert


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
            # As in peft: a product in autocast's dtype would give the experts weights of another dtype. Plans run on
            # the meta device, which has no autocast.
            with nullcontext() if weight.is_meta else torch.autocast(weight.device.type, enabled=False):
                weight = torch.baddbmm(weight, left, right, alpha=scale)
        vars(module)[name] = weight
        try:
            yield
        finally:
            del vars(module)[name]


class SharedExpertsLora(ExpertsLora):
    """An adapter that all experts of a layer share: one A [rank, in] and one B [out, rank] for a parameter.

    Megatron-Bridge calls it `share_expert_adapters`. peft has none, so its files have A and B for each expert
    (`for_each_expert`), and the numbers are those of peft with such files.
    """

    @property
    def stored_shapes(self) -> dict[nn.Parameter, torch.Size]:
        """The shapes of A and B in peft's files."""
        ((first,), (second,)) = (matrices.values() for matrices in (self.lora_A, self.lora_B))
        return {
            first.weight: torch.Size((self.num_experts * len(first.weight), first.weight.shape[1])),
            second.weight: torch.Size((len(second.weight), self.num_experts * second.weight.shape[1])),
        }

    def get_delta_factors(self, adapter_name: str) -> tuple[Tensor, Tensor, float]:
        # As peft has them in memory: the last bit of a product in bfloat16 depends on that.
        first, second = (for_each_expert(one, shape) for one, shape in self.stored_shapes.items())
        first = first.unflatten(0, (self.num_experts, -1))
        second = second.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
        left, right = (second, first) if self._did_swap_in_out_features else (first.mT, second.mT)
        dtype = self.get_param().dtype
        return left.to(dtype), right.to(dtype), self.scaling[adapter_name]

    def get_delta_weight(self, adapter_name: str) -> Tensor:
        left, right, scale = self.get_delta_factors(adapter_name)
        return left @ right * scale


def take_over(root: nn.Module, shared: bool) -> None:
    """Makes peft's layers for single parameters inside `root` those of this module, in place, without values."""
    for module in root.modules():
        if type(module) is ParamWrapper:
            module.__class__ = SharedExpertsLora if shared else ExpertsLora
            for axis, matrices in enumerate((module.lora_A, module.lora_B) if shared else ()):
                (matrix,) = matrices.values()
                rank = matrix.weight.shape[axis] // module.num_experts
                matrix.weight = nn.Parameter(matrix.weight.detach().narrow(axis, 0, rank).clone())
