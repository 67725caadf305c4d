"""ramtorch: RamTorch 1.11's `OffloadModel`, which streams chunks through a window of device slots.

Settings of its README (https://github.com/lodestone-rock/RamTorch, "One GPU", "The three knobs", "Mixed precision"):
window=2, non-reentrant checkpoints, autocast for bf16 over float32 weights, torch's fused AdamW on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from offload import OwnOptimizer
from offload.knobs import knob
from peers.peer import AttachedPeer, adamw_group, clip, set_rate
from peers.stages import ChainPeer, stages


class AttachedRamTorch(AttachedPeer):
    """A Llama as the chain of an `OffloadModel`."""

    def own_optimizer(self, groups: list[dict], clip_norm: float | None, microbatches: int) -> OwnOptimizer:
        from ramtorch import OffloadModel

        self._dtype = next(self.model.parameters()).dtype
        if self.mode.masters == "fp32":
            self.model.float()
        keeps = {"checkpoint": "checkpoint", "recompute": False, "keep": True}[self.mode.backward]
        self._chain = OffloadModel(
            stages(self.model), device=self.device, window=self.mode.window, pin=self.mode.pin, keep_activations=keeps
        )
        # The chain may have moved parameters; it keeps their identity.
        optimizer = torch.optim.AdamW(map(adamw_group, groups), fused=True)
        parameters = list(self._chain.parameters())

        def update(lr: float, measure: bool) -> float | None:
            self._chain.flush_grads()
            norm = clip([p.grad for p in parameters if p.grad is not None], clip_norm, measure)
            set_rate(optimizer, lr)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        return OwnOptimizer(groups[0]["lr"], update)

    def microbatch(self, loss: Callable[[], Tensor], last: bool) -> Tensor:
        batch, weight = self.captured(loss)
        mixed = self.mode.masters == "fp32" and self._dtype != torch.float32
        with torch.autocast(self.device.type, self._dtype, enabled=mixed):
            result = self._chain.step(batch, loss_fn=lambda loss, _: loss * weight)
        return result.loss.detach()

    def close(self) -> None:
        if hasattr(self, "_chain"):
            self._chain.close()
            del self._chain


@dataclass(kw_only=True, eq=False)
class RamTorch(ChainPeer):
    """Each block, the embedding and the head are a chunk; gradients return to the host at the end of the step.

    Args:
        window: chunks on the device at a time.
        pin: chunks that stay on the device.
        backward: checkpoint recomputes by torch's checkpoint, recompute by RamTorch's own means; keep does not.
        masters: fp32 streams float32 weights under autocast; none streams weights of the run's precision and updates
            them in it.
    """

    attached = AttachedRamTorch
    option: ClassVar[str] = "ramtorch"
    package: ClassVar[str] = "ramtorch"
    owns_update: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True

    window: int = knob(2, at_least=1)
    pin: int = knob(0, at_least=0)
    backward: Literal["checkpoint", "recompute", "keep"] = knob("checkpoint")
    masters: Literal["fp32", "none"] = knob("fp32")

    @property
    def notes(self) -> tuple[str, ...]:
        if self.masters == "none":
            return ("without float32 masters: AdamW computes in the precision of the weights",)
        return ("float32 weights are copied in; autocast computes in bf16, but norms and sums in float32",)
