"""fsdp2: torch's `fully_shard` with CPUOffloadPolicy (Zhao et al. 2023), in a world of one process.

Settings as in torchtitan: each block and the root are sharded, float32 parameters are the masters, and the run's
precision is `param_dtype` (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from offload import OwnOptimizer, find_blocks
from peers.peer import AttachedPeer, Peer, adamw_group, clip, names_for_parameters, set_rate
from peers.process_group import join_alone, leave


class AttachedFSDP2(AttachedPeer):
    """A model that `fully_shard` has."""

    def own_optimizer(self, groups: list[dict], clip_norm: float | None, microbatches: int) -> OwnOptimizer:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        model = self.model
        join_alone(self.device)
        names_for_parameters(model, groups)
        dtype = next(model.parameters()).dtype
        # A forward's inputs stay as they are: float32 times would be rounded.
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        policies = {
            "mesh": init_device_mesh(self.device.type, (1,)),
            "mp_policy": mixed,
            "offload_policy": CPUOffloadPolicy(pin_memory=self.device.type == "cuda"),
        }
        for parameter in model.parameters():
            # Buffers keep their dtypes, as they do under `MixedPrecisionPolicy`.
            parameter.data = parameter.data.float()
        for module in (*(block for _, block in find_blocks(model)), model):
            fully_shard(module, **policies)
        parameters = dict(model.named_parameters())
        for group in groups:
            group["params"] = [parameters[name] for name in group["params"]]
        optimizer = torch.optim.AdamW(map(adamw_group, groups), fused=True)

        def update(lr: float, measure: bool) -> float | None:
            gradients = [p.grad.to_local() for p in parameters.values() if p.grad is not None]
            norm = clip(gradients, clip_norm, measure)
            set_rate(optimizer, lr)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        return OwnOptimizer(groups[0]["lr"], update)

    def close(self) -> None:
        leave()


@dataclass(kw_only=True, eq=False)
class FSDP2(Peer):
    """Parameters, gradients and states are on the host; a block's weights come in for forward and for backward."""

    attached = AttachedFSDP2
    option: ClassVar[str] = "fsdp2"
    owns_update: ClassVar[bool] = True
    one_dtype: ClassVar[bool] = True
    notes: ClassVar[tuple[str, ...]] = ("float32 masters are the parameters, and are copied in as float32",)
