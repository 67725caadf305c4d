"""Weights, buffers and optimizer states, which every rank has a copy of. They are equal on all ranks between steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from models.built_again import with_statistics
from models.quantise import stored_tensors
from offload import HostAdamW
from training.checkpoints.tensors import optimizer_tensors, renew_copies
from training.errors import UserError

# The number of updates among the states of a parameter.
STEP = "step"


def refuse_statistics(model: nn.Module) -> None:
    """Raises UserError for a model with running statistics, which would differ from rank to rank."""
    for name, module in with_statistics(model):
        raise UserError(
            f"devices: {name} ({type(module).__name__}) keeps statistics of the examples that it sees, which would"
            " differ between devices: give devices=1"
        )


class Copies:
    """This rank's copy of the tensors of a run. All ranks have one of each parameter in `shared`, and of its states.

    Those of `reference`, a frozen model, are among them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: HostAdamW,
        shared: Collection[nn.Parameter] = (),
        reference: nn.Module | None = None,
    ):
        self._model, self._optimizer, self._reference = model, optimizer, reference
        self._shared = {name for name, tensor in self._named() if tensor in shared}

    def tensors(self) -> dict[str, Tensor]:
        """Returns all by name, in the same order on every rank; waits for updates that are under way.

        States of shared parameters that are on this rank's device are in their places at home afterwards.
        """
        self._optimizer.finish()
        self._optimizer.states.bring_home()
        return {name: tensor for name, (tensor, is_shared) in self._all().items() if not is_shared}

    def shared_tensors(self) -> dict[str, Tensor]:
        """Returns by name those of which the ranks of a host have one copy, in the same order on every rank.

        All ranks of the host have called `tensors` since their last updates.
        """
        return {name: tensor for name, (tensor, is_shared) in self._all().items() if is_shared}

    def renew_copies(self) -> None:
        """Copies weights into the copies beside their states, which are not among the tensors."""
        renew_copies(self._model, self._optimizer)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, model in ("", self._model), ("reference", self._reference):
            if model is not None:
                yield from model.named_parameters(prefix)
                yield from model.named_buffers(prefix)

    def _all(self) -> dict[str, tuple[Tensor, bool]]:
        """Returns all tensors by name, each with whether the ranks of a host share it."""
        found = {}
        for name, tensor in self._named():
            is_shared = name in self._shared
            found |= {key: (stored, is_shared) for key, stored in stored_tensors(name, tensor).items()}
        for name, tensor in optimizer_tensors(self._model, self._optimizer).items():
            parameter, _, key = name.rpartition(".")
            # Each rank counts its updates.
            found[name] = tensor, parameter in self._shared and key != STEP
        return found


def fingerprint(tensor: Tensor) -> int:
    """Returns the sum of a tensor's elements, their bytes read as integers, so that any changed element changes it."""
    flat = tensor.detach().contiguous().reshape(-1)
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(flat.view(widths[flat.element_size()]).sum(dtype=torch.int64)) if flat.numel() else 0
