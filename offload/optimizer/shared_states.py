"""The part of an optimizer's work that one of several processes does, which share parameters and their states.

Each process updates its slices of every shared parameter, with its own cores, and only it reads or writes the states of
these slices (as in ZeRO-1, Rajbhandari et al. 2020). Slices lie in memory that all of them map, so any of them can save
the whole states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from offload.optimizer.formats import MASTER_NAMES, StateFormat
from offload.optimizer.states import State
from offload.runtime.host_memory import HostArena
from offload.runtime.shared_memory import in_pages, share_memory
from offload.runtime.sharers import Sharers, meet

MASTER = MASTER_NAMES[torch.float32]
STEP = "step"


class SharedStates:
    """States of parameters that `sharers` share. `slices` has this process's ranges of each, in elements.

    They are made in the order of `slices`, which is the same on all sharers, when the first is needed.
    """

    def __init__(self, slices: Mapping[Tensor, Sequence[range]], format: StateFormat, sharers: Sharers):
        self._slices = dict(slices)
        self._format = format
        self._sharers = sharers
        self._memory: dict[Tensor, State] = {}

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._slices

    def slices(self, parameter: Tensor) -> Sequence[range]:
        """Returns this process's ranges of a shared parameter, in elements of its flat form."""
        return self._slices[parameter]

    def allocate(self) -> None:
        """Makes the memory of all states; every sharer calls it, and waits for the others.

        Raises MemoryError where the host has no room.
        """
        if self._memory:
            return
        sizes = {parameter: dict(self._tensors(parameter)) for parameter in self._slices}
        each = (parameter.numel() * dtype.itemsize for parameter, of in sizes.items() for dtype in of.values())
        total, host = sum(map(in_pages, each)), torch.device("cpu")
        if self._sharers.rank == 0:
            HostArena(host).require(total)
        # Not page-locked: no device copies them.
        arena = HostArena(host, shared=share_memory(self._sharers, total))
        for parameter, dtypes in sizes.items():
            state = self._memory[parameter] = {}
            for name, dtype in dtypes.items():
                block = arena.allocate(parameter.numel() * dtype.itemsize, name)
                state[name] = block.bytes.view(dtype).view(parameter.shape)

    def settle(self) -> None:
        """Waits until every sharer has made its slices: from then on any of them may give states other values."""
        meet(self._sharers, "making the optimizer's states")

    def make(self, parameter: Tensor) -> State:
        """Returns the state of a parameter before its first update; this process has written its slices of it."""
        self.allocate()
        state = {STEP: torch.zeros(()), **self._memory[parameter]}
        for part in self._slices[parameter]:
            own = slice(part.start, part.stop)
            for name in self._memory[parameter]:
                # Written, so that memory that is missing is missed now.
                flat(state[name])[own].zero_()
            if MASTER in state:
                flat(state[MASTER])[own].copy_(flat(parameter.detach())[own])
        return state

    def adopt(self, parameter: Tensor, loaded: State) -> State:
        """Returns the state of a parameter with the values of `loaded`, which every sharer loads."""
        state = self.make(parameter)
        for name, tensor in loaded.items():
            if name == STEP:
                state[name] = tensor.to(torch.float32)
                continue
            for part in self._slices[parameter]:
                flat(state[name])[part.start : part.stop].copy_(flat(tensor)[part.start : part.stop])
        return state

    def _tensors(self, parameter: Tensor) -> Iterable[tuple[str, torch.dtype]]:
        for name, (dtype, _) in self._format.tensors(parameter.dtype, parameter.shape).items():
            # Each process counts its updates.
            if name != STEP:
                yield name, dtype


def flat(tensor: Tensor) -> Tensor:
    """Returns a view of all elements of a contiguous tensor."""
    return tensor.view(-1)
