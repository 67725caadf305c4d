"""The part of an optimizer's work that one of several processes does, which share parameters and their states.

Each process updates its slices of every shared parameter, with its own cores, and only it reads or writes the states of
these slices (as in ZeRO-1, Rajbhandari et al. 2020). Slices lie in memory that all of them map, so any of them can save
the whole states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from offload.memory.host_memory import HostArena
from offload.optimizer.claims import WEIGHT, Claim, State, update_elsewhere
from offload.optimizer.formats import BLOCK, MASTER_NAMES, StateFormat, needs_copy, state_bytes
from offload.optimizer.kernels import UpdateKernel
from offload.sharing.shared_memory import PagesAhead, in_pages, share_memory
from offload.sharing.sharers import Sharers, meet

MASTER, STEP = MASTER_NAMES[torch.float32], "step"


class SharedStates:
    """States of parameters that `sharers` share. `slices` has this process's ranges of each, in elements.

    `allocate` makes them in the order of `slices`, which is the same on all sharers. A process may
    have its slices of some parameters on its device besides (`place`), where they are updated. Raises ValueError for a
    range that does not begin with a block of 256 numbers, where the format has a scale for each block.
    """

    def __init__(
        self,
        slices: Mapping[Tensor, Sequence[range]],
        format: StateFormat,
        sharers: Sharers,
        ahead: PagesAhead | None = None,
    ):
        if format.state_dtype == "int8" and any(part.start % BLOCK for parts in slices.values() for part in parts):
            raise ValueError(f"states in 8 bits: a slice does not begin at a multiple of {BLOCK} numbers")
        self._slices = dict(slices)
        self._placed: dict[Tensor, PlacedSlices] = {}
        self._format = format
        self._sharers = sharers
        self._ahead = ahead
        self._memory: dict[Tensor, State] = {}
        # The parameters whose states nobody has written yet, where the system has made their pages.
        self._zeros: set[Tensor] = set()

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._slices

    def parts(self, parameter: Tensor) -> Sequence[range]:
        """Returns this process's ranges of a shared parameter, in elements of its flat form."""
        return self._slices[parameter]

    def allocate(self) -> None:
        """Makes the memory of all states; every sharer calls it, and waits for the others.

        Raises MemoryError where the host has no room.
        """
        if self._memory:
            return
        sizes = {p: shared_tensors(self._format, p.dtype, p.shape) for p in self._slices}
        total = sum(shared_state_bytes(self._format, p.dtype, p.shape) for p in self._slices)
        host = torch.device("cpu")
        if self._ahead is not None and self._ahead.nbytes != total:
            # They were of another format.
            self._ahead.close()
            self._ahead = None
        if self._sharers.rank == 0 and self._ahead is None:
            HostArena(host).require(total)
        memory, self._ahead = share_memory(self._sharers, total, self._ahead), None
        # Not page-locked: no device copies them.
        arena = HostArena(host, shared=memory)
        for parameter, tensors in sizes.items():
            state = self._memory[parameter] = {}
            for name, (dtype, shape) in tensors.items():
                block = arena.allocate(dtype.itemsize * shape.numel(), name)
                state[name] = block.bytes.view(dtype).view(shape)
        self._zeros = set(sizes) if memory.is_made else set()

    def settle(self) -> None:
        """Waits until every sharer has made its slices: from then on any of them may give states other values."""
        meet(self._sharers, "making the optimizer's states")

    def make(self, parameter: Tensor) -> State:
        """Returns the state of a parameter before its first update; this process has written its slices of it.

        Raises RuntimeError before `allocate`, which waits for the other sharers: an update may be beside their steps.
        """
        if not self._memory:
            raise RuntimeError("the states that processes share have no memory yet: call optimizer.allocate() first")
        if parameter in self._placed:
            # They are made anew from those at home, which have other values now.
            self._placed[parameter].forget()
        state = {STEP: torch.zeros(()), **self._memory[parameter]}
        are_zeros = parameter in self._zeros
        self._zeros.discard(parameter)
        for part in self._slices[parameter]:
            for name in self._memory[parameter]:
                if not are_zeros:
                    # Written, so that memory that is missing is missed now.
                    part_of(state[name], parameter, part).zero_()
            if MASTER in state:
                part_of(state[MASTER], parameter, part).copy_(part_of(parameter.detach(), parameter, part))
        return state

    def prepare(self, parameter: Tensor, state: State) -> None:
        """Makes the parameter's state if it has none."""
        if not state:
            state |= self.make(parameter)

    def adopt(self, parameter: Tensor, loaded: State) -> State:
        """Returns the state of a parameter with the values of `loaded`, which every sharer loads."""
        state = self.make(parameter)
        for name, tensor in loaded.items():
            if name == STEP:
                state[name] = tensor.to(torch.float32)
                continue
            for part in self._slices[parameter]:
                part_of(state[name], parameter, part).copy_(part_of(tensor.contiguous(), parameter, part))
        return state

    # Slices on this process's device.

    def bytes_to_place(self, parameter: Tensor) -> int:
        """Returns the bytes that the states of this process's slices take on a device."""
        parts = (torch.empty(len(part), dtype=parameter.dtype, device="meta") for part in self._slices[parameter])
        return state_bytes((part.requires_grad_(parameter.requires_grad) for part in parts), self._format, placed=True)

    def place(self, parameter: Tensor, state: State, device: torch.device) -> None:
        """Places this process's slices of a parameter on `device`, where they are updated from now on."""
        if parameter not in self._placed:
            self._placed[parameter] = PlacedSlices(parameter, self._slices[parameter], self._format, device)

    def is_placed(self, parameter: Tensor) -> bool:
        return parameter in self._placed

    def device_of(self, parameter: Tensor) -> torch.device:
        """Returns the device on which the parameter's slices are."""
        return self._placed[parameter].device

    def own_part(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Returns this process's slices of a whole gradient, one behind the other (1-D)."""
        parts = [part_of(gradient.contiguous(), parameter, part) for part in self._slices[parameter]]
        return torch.cat(parts or [gradient.new_empty(0)])

    def update_placed(
        self, claim: Claim, state: State, gradient: Tensor, kernel: UpdateKernel, scale: float
    ) -> list[tuple[Tensor, Tensor]]:
        """Updates slices on the device; see `PlacedSlices.update`."""
        return self._placed[claim.parameter].update(claim, state, gradient, kernel, scale)

    def bring_home(self) -> None:
        """Copies the states of this process's slices on the device to their places at home."""
        for parameter, placed in self._placed.items():
            if parameter in self._memory:
                placed.copy_home(self._memory[parameter])


class PlacedSlices:
    """The states of a process's `slices` of one parameter on its `device`, where they are updated.

    They are made from those at home by the first update. At home, in the memory that all sharers map, they are older
    from then on, until `copy_home`; they have their room there all the same, because a checkpoint needs it. A weight
    that this process has written since the last update counts as it is then, as in `OwnStates`; what another process
    writes is not seen.
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
            weight = update_elsewhere(claim, state, own, kernel, scale, part.start)
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


def shared_tensors(
    format: StateFormat, weight: torch.dtype, shape: torch.Size
) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Returns dtype and shape of the shared tensors in a parameter's state. Each process counts its updates alone."""
    tensors = format.tensors(weight, shape)
    del tensors[STEP]
    return tensors


def shared_state_bytes(format: StateFormat, weight: torch.dtype, shape: torch.Size) -> int:
    """Returns the bytes of shared memory that these tensors take."""
    tensors = shared_tensors(format, weight, shape)
    return sum(in_pages(dtype.itemsize * size.numel()) for dtype, size in tensors.values())


def part_of(tensor: Tensor, parameter: Tensor, part: range) -> Tensor:
    """Returns a flat view of what a tensor of the parameter's state has for these elements: numbers, or their scales.

    In a format with scales the range begins with a block of 256.
    """
    flat = tensor.view(-1)
    if len(flat) != parameter.numel():
        return flat[part.start // BLOCK : -(-part.stop // BLOCK)]
    return flat[part.start : part.stop]
