"""diffusers_group: the group offloading of diffusers, forward only.

Settings of its documentation (https://huggingface.co/docs/diffusers/main/en/optimization/memory#group-offloading):
block_level groups, on a GPU with a stream that prefetches the next group from page-locked memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from offload import OwnOptimizer, find_blocks
from offload.knobs import knob
from peers.peer import AttachedPeer, Peer


class AttachedGroups(AttachedPeer):
    """A model whose blocks are in groups."""

    def own_optimizer(self, groups: list[dict], clip_norm: float | None, microbatches: int) -> OwnOptimizer:
        from diffusers.hooks import apply_group_offloading

        model, cuda = self.model, self.device.type == "cuda"
        owners = dict.fromkeys(_owner_of_list(model, name) for name, _ in find_blocks(model))
        for owner in owners:
            apply_group_offloading(
                owner,
                onload_device=self.device,
                offload_device=torch.device("cpu"),
                offload_type="block_level",
                num_blocks_per_group=self.mode.blocks,
                use_stream=cuda,
            )
        offloaded = {module for owner in owners for module in owner.modules()}
        for module in model.modules():
            if module not in offloaded:
                # The modules around the owners move the tensors that they hold themselves.
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    tensor.data = tensor.data.to(self.device)
        return OwnOptimizer(groups[0]["lr"], lambda lr, measure: 0.0 if measure else None)

    def microbatch(self, loss: Callable[[], Tensor], last: bool) -> Tensor:
        with torch.no_grad():
            return loss()


@dataclass(kw_only=True, eq=False)
class DiffusersGroup(Peer):
    """Groups of blocks come to the device for a forward; a step computes its loss, and nothing else.

    Args:
        blocks: blocks of a group; with a stream diffusers takes one.
    """

    attached = AttachedGroups
    option: ClassVar[str] = "diffusers_group"
    package: ClassVar[str] = "diffusers"
    owns_update: ClassVar[bool] = True
    lacks: ClassVar[frozenset[str]] = frozenset({"checkpoints", "clipping", "training"})
    notes: ClassVar[tuple[str, ...]] = ("forward only: a step has no gradients and no update",)

    blocks: int = knob(1, at_least=1)


def _owner_of_list(model: nn.Module, block: str) -> nn.Module:
    """Returns the module that has, as an attribute, the list of the block with this name."""
    return model.get_submodule(block.rpartition(".")[0].rpartition(".")[0])
