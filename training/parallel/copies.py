"""Weights, buffers and optimizer states, which every rank has a copy of. They are equal on all ranks between steps."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from models.quantise import stored_tensors
from offload import HostAdamW
from training.checkpoints.tensors import optimizer_tensors, renew_copies
from training.errors import UserError

# The number of updates among the states of a parameter.
STEP = "step"
# Their statistics are those of one rank's examples.
WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def refuse_statistics(model: nn.Module) -> None:
    """Raises UserError for a model with running statistics, which would differ from rank to rank."""
    for name, module in model.named_modules():
        if isinstance(module, WITH_STATISTICS) and module.track_running_stats:
            raise UserError(
                f"devices: {name} ({type(module).__name__}) keeps statistics of the examples that it sees, which would"
                " differ between devices: give devices=1"
            )


class Copies:
    """This rank's copy of the tensors of a run. Of the parameters `shared` all ranks have one, and their states."""

    def __init__(self, model: nn.Module, optimizer: HostAdamW, shared: Collection[nn.Parameter] = ()):
        self._model = model
        self._optimizer = optimizer
        self._shared = {name for name, parameter in model.named_parameters() if parameter in shared}

    def tensors(self) -> dict[str, Tensor]:
        """Returns all by name, in the same order on every rank; waits for updates that are under way."""
        self._optimizer.finish()
        found = {}
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if name not in self._shared:
                found |= stored_tensors(name, tensor)
        for name, tensor in optimizer_tensors(self._model, self._optimizer).items():
            parameter, _, key = name.rpartition(".")
            # Each rank counts its updates.
            if parameter not in self._shared or key == STEP:
                found[name] = tensor
        return found

    def renew_copies(self) -> None:
        """Copies weights into the copies beside their states, which are not among the tensors."""
        renew_copies(self._model, self._optimizer)

    def fingerprints(self) -> dict[str, int]:
        """Returns a number for each tensor."""
        return {name: fingerprint(tensor) for name, tensor in self.tensors().items()}


def fingerprint(tensor: Tensor) -> int:
    """Returns the sum of a tensor's elements, their bytes read as integers, so that any changed element changes it."""
    flat = tensor.detach().contiguous().reshape(-1)
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(flat.view(widths[flat.element_size()]).sum(dtype=torch.int64)) if flat.numel() else 0
