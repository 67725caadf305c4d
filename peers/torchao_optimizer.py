"""torchao_optimizer: torchao's CPUOffloadOptimizer, with the model on the device and the update on the host.

Settings of its README (https://github.com/pytorch/ao/tree/main/torchao/optim, "Optimizer CPU offload"): torch's fused
AdamW as the base, and gradients that leave the device too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from offload import OwnOptimizer
from offload.knobs import knob
from peers.peer import AttachedPeer, Peer, adamw_group, norm_of


class AttachedTorchao(AttachedPeer):
    """A model on the device whose optimizer is on the host."""

    def own_optimizer(self, groups: list[dict], clip_norm: float | None, microbatches: int) -> OwnOptimizer:
        from torchao.optim import CPUOffloadOptimizer

        # It frees each gradient when it has left, so that a second microbatch would replace it.
        optimizer = CPUOffloadOptimizer(
            list(map(adamw_group, groups)),
            torch.optim.AdamW,
            offload_gradients=self.mode.offload_gradients and microbatches == 1,
            fused=True,
        )
        small = [p for group in optimizer.d_param_groups for p in group["params"]]

        def update(lr: float, measure: bool) -> float | None:
            norm = None
            if measure:
                optimizer.stream.synchronize()
                hosts = (host.grad for device, host in optimizer.param_d2h_map.items() if device in optimizer.queue)
                norm = norm_of([*hosts, *(p.grad for p in small if p.grad is not None)])
            for group in optimizer.param_groups:
                group["lr"] = lr
            if optimizer.d_opt is not None:
                # Its `param_groups` are not those that it was made of.
                for group in optimizer.d_opt.param_groups:
                    group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
            return norm

        return OwnOptimizer(groups[0]["lr"], update)


@dataclass(kw_only=True, eq=False)
class TorchaoOptimizer(Peer):
    """Gradients go to the host as backward makes them; each weight is updated there and copied back.

    Args:
        offload_gradients: gradients do not stay on the device. Needs one microbatch a step.
    """

    attached = AttachedTorchao
    option: ClassVar[str] = "torchao_optimizer"
    package: ClassVar[str] = "torchao"
    needs_cuda: ClassVar[bool] = True
    owns_update: ClassVar[bool] = True
    on_host: ClassVar[bool] = False
    lacks: ClassVar[frozenset[str]] = frozenset({"checkpoints", "clipping"})
    notes: ClassVar[tuple[str, ...]] = (
        "without float32 masters: the host copies and both moments have the precision of the weights",
    )

    offload_gradients: bool = knob(True)
