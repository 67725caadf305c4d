"""roundpipe: RoundPipe 0.1.1, which uploads groups of layers in turn and updates float32 masters on the host.

Settings of its documentation (https://itcarrot.github.io/RoundPipe): the model as an nn.Sequential, fused
`forward_backward`, `optim_dtype=float32` with its own Adam, execution plan and page-locking at their defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from offload import OwnOptimizer
from offload.knobs import knob
from peers.peer import AttachedPeer, PeerError, adamw_group, clip, set_rate
from peers.stages import ChainPeer, stages


class AttachedRoundPipe(AttachedPeer):
    """A Llama as the chain of a `RoundPipe`."""

    def own_optimizer(self, groups: list[dict], clip_norm: float | None, microbatches: int) -> OwnOptimizer:
        import roundpipe

        names = {parameter: name for name, parameter in self.model.named_parameters()}
        chain = nn.Sequential(*stages(self.model))
        of_chain = {names[parameter]: name for name, parameter in chain.named_parameters()}
        for group in groups:
            group["params"] = [of_chain[names[parameter]] for parameter in group["params"]]
        run_config = roundpipe.RoundPipeRunConfig(num_microbatch=self.mode.num_microbatch)
        self._chain = roundpipe.RoundPipe(chain, optim_dtype=torch.float32, name="model", model_run_config=run_config)
        # Its masters, under the names that the parameters have in the wrapped chain.
        masters = {name.removeprefix("model."): master for name, master in self._chain.optim_named_parameters()}
        for group in groups:
            group["params"] = [masters[name] for name in group["params"]]
        optimizer = roundpipe.optim.Adam(list(map(adamw_group, groups)), decoupled_weight_decay=True)
        measured: list[float | None] = []

        def step(lr: float, measure: bool) -> None:
            gradients = [master.grad for master in masters.values() if master.grad is not None]
            measured.append(clip(gradients, clip_norm, measure))
            set_rate(optimizer, lr)
            optimizer.step()
            optimizer.zero_grad()

        def update(lr: float, measure: bool) -> float | None:
            self._chain.step(step, self.mode.stale, lr, measure)
            # A stale update is still under way; the norm of an earlier one is of no use.
            return None if self.mode.stale else measured.pop()

        return OwnOptimizer(groups[0]["lr"], update)

    def microbatch(self, loss: Callable[[], Tensor], last: bool) -> Tensor:
        batch, weight = self.captured(loss)
        examples = len(batch[0])
        parts = min(self.mode.num_microbatch, examples)
        if examples % parts:
            # Each part's loss is a mean over its own examples, and all count alike.
            problem = f"does not divide the {examples} examples of a microbatch evenly: take 1, or another batch_size"
            raise PeerError("offload.num_microbatch", self.mode.num_microbatch, problem)
        weight /= parts
        return self._chain.forward_backward(
            # It takes its inputs from host memory.
            input_args=tuple(part.cpu() for part in batch),
            loss_fn=lambda loss, _: loss * weight,
        ).detach()

    def close(self) -> None:
        if hasattr(self, "_chain"):
            self._chain.optim_updated.wait()
            del self._chain


@dataclass(kw_only=True, eq=False)
class RoundPipe(ChainPeer):
    """Layers are recomputed in backward; the update is beside the next step if it may be one step stale.

    Args:
        stale: the update runs on a thread beside the next step, which computes with the weights before it.
        num_microbatch: microbatches that pass through a group of layers, of equal size; its own default is the number
            of GPUs plus 1.
    """

    attached = AttachedRoundPipe
    option: ClassVar[str] = "roundpipe"
    package: ClassVar[str] = "roundpipe"
    needs_cuda: ClassVar[bool] = True
    owns_update: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True

    stale: bool = knob(False)
    num_microbatch: int = knob(1, at_least=1)

    @property
    def notes(self) -> tuple[str, ...]:
        compiled = ("its Adam is compiled with -Ofast",)
        return ("updates are one step stale", *compiled) if self.stale else compiled
