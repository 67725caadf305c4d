"""States of a process's slices of a shared parameter that live on its device, and are updated there.

At home, in the memory that all sharers map, the states of these slices are older from the first update on, until
`copy_home`. They have their room there all the same, because a checkpoint needs it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.optimizer.block_quantise import BLOCK
from offload.optimizer.claims import Claim, update_slice
from offload.optimizer.formats import StateFormat
from offload.optimizer.kernels import UpdateKernel
from offload.optimizer.states import WEIGHT, State, needs_copy, state_bytes

STEP = "step"


class PlacedSlices:
    """The states of the `slices` of one parameter on `device`, in ranges of its elements.

    They are made from those at home by the first update. A weight that this process has written since the last update
    counts as it is then, as in `StatePlacement`; what another process writes is not seen.
    """

    def __init__(self, parameter: Tensor, slices: Sequence[range], format: StateFormat, device: torch.device):
        self.device = device
        self._parameter = parameter
        self._slices = slices
        self._copies_weight = needs_copy(parameter, format, placed=True)
        self._states: list[State] = []
        # Autograd's version counter of the parameter when the copies of the weight were last equal to it.
        self._version: int | None = None

    def update(
        self, claim: Claim, home: State, gradient: Tensor, kernel: UpdateKernel, scale: float
    ) -> list[tuple[Tensor, Tensor]]:
        """Updates the states with `gradient`, which has the slices one behind the other, on the current stream.

        `home` is the whole state at home, whose `step` counts this update already, as the parameter's version does.
        Returns for each slice its place at home and its new weight on the device, both 1-D.
        """
        if not self._states:
            self._states = [self._made(home, part) for part in self._slices]
        self._renew_weights()
        pairs, places = [], self._parameter.data.view(-1)
        gradients = gradient.split([len(part) for part in self._slices])
        for part, state, own in zip(self._slices, self._states, gradients, strict=True):
            # A number of the host, so that nobody waits for a copy.
            state[STEP] = torch.full((), home[STEP].item(), dtype=torch.float32, device=self.device)
            weight = update_slice(claim, state, part.start, own, kernel, scale)
            pairs.append((places[part.start : part.stop], weight))
        return pairs

    def copy_home(self, home: State) -> None:
        """Copies the states into those at home. No update is under way."""
        for part, state in zip(self._slices, self._states, strict=False):
            for name, tensor in state.items():
                if name not in (STEP, WEIGHT):
                    part_of(home[name], self._parameter, part).copy_(tensor)

    def forget(self) -> None:
        """Drops the states: the next update makes them from those at home."""
        self._states, self._version = [], None

    def _made(self, home: State, part: range) -> State:
        return {
            name: part_of(tensor, self._parameter, part).to(self.device, copy=True)
            for name, tensor in home.items()
            if name != STEP
        }

    def _renew_weights(self) -> None:
        # This update has raised the version by one.
        if self._copies_weight and self._version != self._parameter._version - 1:
            weights = self._parameter.data.view(-1)
            for part, state in zip(self._slices, self._states, strict=True):
                state[WEIGHT] = weights[part.start : part.stop].to(self.device, copy=True)
        self._version = self._parameter._version


def part_of(tensor: Tensor, parameter: Tensor, part: range) -> Tensor:
    """Returns a flat view of what a tensor of the parameter's state has for these elements: numbers, or their scales.

    In a format with scales the range begins with a block of 256.
    """
    flat = tensor.view(-1)
    if len(flat) != parameter.numel():
        return flat[part.start // BLOCK : -(-part.stop // BLOCK)]
    return flat[part.start : part.stop]


def bytes_of_slices(parameter: Tensor, slices: Sequence[range], format: StateFormat) -> int:
    """Returns the bytes that the states of these slices take on a device."""
    parts = (torch.empty(len(part), dtype=parameter.dtype, device="meta") for part in slices)
    return state_bytes((part.requires_grad_(parameter.requires_grad) for part in parts), format, placed=True)
