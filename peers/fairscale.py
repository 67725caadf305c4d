"""fairscale: fairscale 0.4.13's `OffloadModel`, which has slices of a sequential model on the device in turn.

Settings of its documentation (https://fairscale.readthedocs.io/en/stable/deep_dive/offload.html): a slice a block,
activation checkpointing at the boundaries of slices. Norm, head and loss stay on the device, outside of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from offload.knobs import knob
from peers.peer import AttachedPeer
from peers.stages import BlockStage, ChainPeer


class Block(BlockStage):
    """A block of the slices, which pass on one tensor."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.block_output(hidden)


class AttachedFairscale(AttachedPeer):
    """A Llama whose blocks are slices of an `OffloadModel`."""

    def prepare(self) -> None:
        from fairscale.experimental.nn.offload import OffloadModel

        model = self.model
        decoder = model.model
        for module in (decoder.norm, model.lm_head):
            module.to(self.device)
        chain = [decoder.embed_tokens, *(Block(decoder, block) for block in decoder.layers)]
        self._slices = OffloadModel(
            nn.Sequential(*chain),
            device=self.device,
            offload_device=torch.device("cpu"),
            num_slices=self.mode.slices or len(chain),
            checkpoint_activation=self.mode.checkpoint,
            num_microbatches=1,
        )
        model.forward = self._forward

    def close(self) -> None:
        vars(self.model).pop("forward", None)
        del self._slices

    def _forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        model = self.model
        return model.lm_head(model.model.norm(self._slices(ids)), labels)


@dataclass(kw_only=True, eq=False)
class Fairscale(ChainPeer):
    """Weights and gradients are on the host but for the slice that runs; the run's own optimizer updates there.

    Args:
        slices: the number of parts, of about equal size, that the model is cut into; null makes one of each block.
        checkpoint: backward computes each slice again from its input, which waits in host memory.
    """

    attached = AttachedFairscale
    option: ClassVar[str] = "fairscale"
    package: ClassVar[str] = "fairscale"
    needs_cuda: ClassVar[bool] = True
    notes: ClassVar[tuple[str, ...]] = ("compute does not wait for weights, nor the host for gradients",)

    slices: int | None = knob(None, at_least=1)
    checkpoint: bool = knob(True)

    @property
    def recomputes(self) -> bool:
        return self.checkpoint
