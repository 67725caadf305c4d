"""The states of AdamW parameter by parameter: the device they live on, and how they are made and updated there.

The state of a parameter is a dict: `step` (float32 scalar), `exp_avg` and `exp_avg_sq` (the parameter's shape,
contiguous), or their `_codes` (uint8) and `_scale` (float32, one for each block of 256); and, by the format, what makes
the master of the weight: `master` or `remainder`, of the parameter's shape. `weight` is a copy of the parameter, where
the parameter itself is on another device than its state, or not contiguous.

Processes that share parameters share their states too. Each updates its slices of every shared parameter, and only it
reads or writes the states of these (as in ZeRO-1, Rajbhandari et al. 2020). They lie in memory that all of them map, so
any of them can save the whole states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from offload.knobs import GIB
from offload.memory.host_memory import HUGE_PAGE_BYTES, HostArena, HostBlock, populate
from offload.memory.limits import free_host_bytes
from offload.optimizer.claims import WEIGHT, Claim, State, update_elsewhere, update_in_place
from offload.optimizer.formats import BLOCK, MASTER_NAMES, StateFormat, needs_copy, state_bytes
from offload.optimizer.kernels import UpdateKernel
from offload.sharing.shared_memory import PagesAhead, in_pages, share_memory
from offload.sharing.sharers import Sharers, meet
from offload.torch_private.torch_internals import add_to_each

MASTER, STEP = MASTER_NAMES[torch.float32], "step"
# Elements of a range that `some_elements` has at least, if there are so many.
MARKED = 16
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class States:
    """The states of an optimizer's parameters, `tensors`: beside these, or on the device where `place` puts them.

    A parameter that was written since its last update counts as it is then, but for one with a float32 master, and for
    what other processes write to a shared one. Of a parameter that is shared and placed, the states of this process's
    slices are on the device from the first update on; those in `tensors` are older then, until `bring_home`.
    """

    def __init__(self, format: StateFormat, tensors: MutableMapping[Tensor, State]):
        self.tensors = tensors
        self._format = format
        self._shared: SharedStates | None = None
        # This process's ranges of shared parameters, and their states on the device.
        self._slices: Mapping[Tensor, Sequence[range]] = {}
        self._pieces: dict[Tensor, list[State]] = {}
        self._placed: dict[Tensor, torch.device] = {}
        # The names of the tensors in the state of a parameter, by its dtype.
        self._names: dict[torch.dtype, frozenset[str]] = {}
        # The versions of parameters at which the copies of their weights were last equal to them.
        self._versions: dict[Tensor, tuple[int, int]] = {}

    def share(
        self, slices: Mapping[Tensor, Sequence[range]], sharers: Sharers, ahead: PagesAhead | None = None
    ) -> None:
        """Makes this process one of several that update the parameters of `slices`, each in its own ranges of elements.

        The parameters, contiguous and on the host, are shared memory, and so will be their states, which `allocate`
        makes of the pages of `ahead`; every sharer calls that, and waits. Raises RuntimeError where states exist or are
        placed, and ValueError for moments in 8 bits where a range does not begin with a block of 256 numbers.
        """
        if self.tensors or not self._placed.keys().isdisjoint(slices):
            raise RuntimeError("states that exist cannot be shared: share the parameters before anything has states")
        if self._format.state_dtype == "int8" and any(part.start % BLOCK for each in slices.values() for part in each):
            raise ValueError(f"states in 8 bits: a slice does not begin at a multiple of {BLOCK} numbers")
        self._slices = dict(slices)
        self._shared = SharedStates(self._slices, self._format, sharers, ahead)

    def allocate(self, parameters: Iterable[Tensor]) -> None:
        """Makes the states of those `parameters` that train and have none; see `HostAdamW.allocate`."""
        if self._shared is not None:
            self._shared.allocate()
        missing = [p for p in parameters if p.requires_grad and not self.tensors.get(p)]
        away = self._slices.keys() | self._placed.keys()
        needed = state_bytes((p for p in missing if p.device.type == "cpu" and p not in away), self._format)
        free = free_host_bytes()
        if free is not None and needed > free:
            raise MemoryError(
                f"{needed / GIB:.2f} GiB of host memory are needed for the optimizer's states,"
                f" {free / GIB:.2f} GiB are free"
            )
        for parameter in missing:
            self._prepare(parameter, self.tensors[parameter])
        if self._shared is not None:
            # From then on any sharer may give states other values.
            meet(self._shared.sharers, "making the optimizer's states")

    def begin(self, parameters: list[Tensor]) -> list[State]:
        """Counts updates that are about to be made, of parameters of one device; returns the parameters' states."""
        states = [self.tensors[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            self._prepare(parameter, state)
            if parameter in self._placed and parameter in self._slices:
                self._prepare_pieces(parameter, state)
        add_to_each([state[STEP] for state in states], 1)
        # The kernels that write the weight themselves do not raise its version.
        torch.autograd.graph.increment_version(parameters)
        for parameter, state in zip(parameters, states, strict=True):
            if WEIGHT in state or parameter in self._pieces:
                self._versions[parameter] = version_and_address(parameter)
        return states

    def update(self, claim: Claim, kernel_on: Callable[[torch.device], UpdateKernel], scale: float) -> None:
        """Makes a claimed update where the state is; the gradient counts `scale` times."""
        parameter, gradient = claim.parameter, claim.gradient
        if parameter not in self._placed:
            (state,) = self.begin([parameter])
            update_in_place(claim, state, kernel_on(parameter.device), scale, self.parts(parameter))
            return
        # The copy there is made anew: see `some_elements`.
        torch.autograd.graph.increment_version(parameter)
        if parameter in self._slices:
            flat = gradient.contiguous().view(-1)
            gradient = torch.cat([flat[:0], *(flat[part.start : part.stop] for part in self._slices[parameter])])
        for home, weight in self.update_placed(claim, gradient.to(self._placed[parameter]), kernel_on, scale):
            home.copy_(weight)

    @torch.no_grad()
    def update_placed(
        self, claim: Claim, gradient: Tensor, kernel_on: Callable[[torch.device], UpdateKernel], scale: float = 1.0
    ) -> list[tuple[Tensor, Tensor]]:
        """Updates the placed state of a claimed parameter with `gradient` on its device, on the current stream.

        Where the parameter is shared, `gradient` has this process's slices, one behind the other (1-D). Returns pairs
        of a place at home and the new weight for it on the device, alike in shape and dtype.
        """
        parameter = claim.parameter
        (state,) = self.begin([parameter])
        kernel = kernel_on(self._placed[parameter])
        if parameter not in self._slices:
            return [(parameter.data, update_elsewhere(claim, state, gradient, kernel, scale))]
        pairs, parts = [], self._slices[parameter]
        gradients = gradient.split([len(part) for part in parts])
        for part, piece, own in zip(parts, self._pieces[parameter], gradients, strict=True):
            # A number of the host, so that nobody waits for a copy.
            piece[STEP] = torch.full((), state[STEP].item(), dtype=torch.float32, device=gradient.device)
            weight = update_elsewhere(claim, piece, own, kernel, scale, part.start)
            pairs.append((part_of(parameter.data, parameter, part), weight))
        return pairs

    def bytes_to_place(self, parameters: Iterable[Tensor]) -> int:
        """Returns the bytes of the states that `place` puts on the device for these parameters, masters included."""
        pieces = (
            torch.empty(len(part), dtype=parameter.dtype, device="meta", requires_grad=parameter.requires_grad)
            for parameter in dict.fromkeys(parameters)
            for part in self.parts(parameter)
        )
        return state_bytes(pieces, self._format, placed=True)

    def place(self, parameters: Iterable[Tensor], device: torch.device) -> None:
        """Puts the states of these parameters, masters too, on `device`, wherever the parameters live.

        States that exist move. They are updated by `update_placed`, for a caller who has the gradients there.
        """
        for parameter in parameters:
            self._placed[parameter] = device
            if parameter not in self._slices and (state := self.tensors.get(parameter)):
                state |= {name: tensor.to(device) for name, tensor in state.items()}

    def is_placed(self, parameter: Tensor) -> bool:
        """True if what this process has of a parameter's state was placed on a device, and is updated there."""
        return parameter in self._placed

    def parts(self, parameter: Tensor) -> Sequence[range]:
        """Returns the ranges of elements of a parameter's flat form that this process updates: all, or its slices."""
        return self._slices[parameter] if parameter in self._slices else (range(parameter.numel()),)

    def bring_home(self) -> None:
        """Copies shared states that were updated on this process's device to the memory that all sharers read."""
        for parameter, pieces in self._pieces.items():
            home = self.tensors[parameter]
            for part, piece in zip(self._slices[parameter], pieces, strict=True):
                for name, tensor in piece.items():
                    if name not in (STEP, WEIGHT):
                        part_of(home[name], parameter, part).copy_(tensor)

    def adopt(self, loaded: Mapping[Tensor, State]) -> None:
        """Takes loaded states, of this format, in the place of all that there are; each sharer loads them."""
        self.tensors.clear()
        # They are made anew from those at home, which have other values now.
        self._pieces.clear()
        for parameter, state in loaded.items():
            if parameter not in self._slices:
                device = self._placed.get(parameter, parameter.device)
                self.tensors[parameter] = {name: tensor.to(device).contiguous() for name, tensor in state.items()}
                continue
            own = self.tensors[parameter]
            self._prepare(parameter, own)
            own[STEP] = state[STEP].to(torch.float32)
            for name in state.keys() - {STEP}:
                for part in self._slices[parameter]:
                    part_of(own[name], parameter, part).copy_(part_of(state[name].contiguous(), parameter, part))

    def _prepare(self, parameter: Tensor, state: State) -> None:
        """Makes the missing tensors of the parameter's state, and a copy of the weight that is outdated."""
        if parameter in self._slices:
            if not state:
                state |= self._shared.made(parameter)
            return
        names = self._names.get(parameter.dtype)
        if names is None or not names <= state.keys():
            self._complete(parameter, state)
        is_placed = parameter in self._placed
        if not needs_copy(parameter, self._format, is_placed):
            return
        if WEIGHT not in state:
            state[WEIGHT] = self._zeros(parameter, parameter.shape, parameter.dtype)
            self._versions.pop(parameter, None)
        # A copy beside the parameter is made anew each time: writes through `.data` or NumPy raise no version.
        if not is_placed or self._versions.get(parameter) != version_and_address(parameter):
            state[WEIGHT].copy_(parameter.detach())
            self._versions[parameter] = version_and_address(parameter)

    def _prepare_pieces(self, parameter: Tensor, home: State) -> None:
        """Makes the states of slices on the device from those at home, and copies of their weights if outdated."""
        device, parts = self._placed[parameter], self._slices[parameter]
        is_new = parameter not in self._pieces
        if is_new:
            tensors = {name: tensor for name, tensor in home.items() if name != STEP}
            self._pieces[parameter] = [
                {name: part_of(tensor, parameter, part).to(device, copy=True) for name, tensor in tensors.items()}
                for part in parts
            ]
        if needs_copy(parameter, self._format, placed=True) and (
            is_new or self._versions.get(parameter) != version_and_address(parameter)
        ):
            for part, piece in zip(parts, self._pieces[parameter], strict=True):
                piece[WEIGHT] = part_of(parameter.data, parameter, part).to(device, copy=True)

    def _complete(self, parameter: Tensor, state: State) -> None:
        tensors = self._format.tensors(parameter.dtype, parameter.shape)
        self._names[parameter.dtype] = frozenset(tensors)
        for name, (dtype, shape) in tensors.items():
            if name not in state:
                memory = self._zeros(parameter, shape, dtype)
                if name == MASTER:
                    memory.copy_(parameter.detach())
                # Last, so that an interrupt leaves no master of zeros.
                state[name] = memory

    def _zeros(self, parameter: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns zeros whose memory is there, and not merely promised: what is missing is missed now."""
        device, nbytes = self._placed.get(parameter, parameter.device), dtype.itemsize * shape.numel()
        if device.type == "cpu" and nbytes >= HUGE_PAGE_BYTES:
            block = HostBlock(nbytes, "states")
            # Pages that the system makes are zeros: to write them takes longer than to make them.
            if populate(block.bytes.data_ptr(), nbytes):
                return block.bytes.view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device).zero_()


class SharedStates:
    """The memory of the states of parameters that `sharers` share; `slices` has this process's ranges of each.

    It is in the order of `slices`, which is the same on all sharers.
    """

    def __init__(
        self,
        slices: Mapping[Tensor, Sequence[range]],
        format: StateFormat,
        sharers: Sharers,
        ahead: PagesAhead | None = None,
    ):
        self.sharers = sharers
        self._slices = slices
        self._format = format
        self._ahead = ahead
        self._memory: dict[Tensor, State] = {}
        # The parameters whose states nobody has written yet, where the system has made their pages.
        self._zeros: set[Tensor] = set()

    def allocate(self) -> None:
        """Makes the memory of all states; every sharer calls it, and waits for the others.

        Raises MemoryError where the host has no room.
        """
        if self._memory:
            return
        total = sum(shared_state_bytes(self._format, p.dtype, p.shape) for p in self._slices)
        host = torch.device("cpu")
        if self._ahead is not None and self._ahead.nbytes != total:
            # They were of another format.
            self._ahead.close()
            self._ahead = None
        if self.sharers.rank == 0 and self._ahead is None:
            HostArena(host).require(total)
        memory, self._ahead = share_memory(self.sharers, total, self._ahead), None
        # Not page-locked: no device copies them.
        arena = HostArena(host, shared=memory)
        for parameter in self._slices:
            state = self._memory[parameter] = {}
            for name, (dtype, shape) in _shared_tensors(self._format, parameter.dtype, parameter.shape).items():
                block = arena.allocate(dtype.itemsize * shape.numel(), name)
                state[name] = block.bytes.view(dtype).view(shape)
        self._zeros = set(self._slices) if memory.is_made else set()

    def made(self, parameter: Tensor) -> State:
        """Returns the state of a parameter before its first update; this process has written its slices of it.

        Raises RuntimeError before `allocate`, which waits for the other sharers: an update may be beside their steps.
        """
        if not self._memory:
            raise RuntimeError("the states that processes share have no memory yet: call optimizer.allocate() first")
        memory = self._memory[parameter]
        for part in self._slices[parameter]:
            if parameter not in self._zeros:
                for tensor in memory.values():
                    # Written, so that memory that is missing is missed now.
                    part_of(tensor, parameter, part).zero_()
            if MASTER in memory:
                part_of(memory[MASTER], parameter, part).copy_(part_of(parameter.detach(), parameter, part))
        self._zeros.discard(parameter)
        return {STEP: torch.zeros(()), **memory}


def _shared_tensors(
    format: StateFormat, weight: torch.dtype, shape: torch.Size
) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Returns dtype and shape of the shared tensors in a parameter's state. Each process counts its updates alone."""
    tensors = format.tensors(weight, shape)
    del tensors[STEP]
    return tensors


def shared_state_bytes(format: StateFormat, weight: torch.dtype, shape: torch.Size) -> int:
    """Returns the bytes of shared memory that a shared parameter's state takes."""
    tensors = _shared_tensors(format, weight, shape)
    return sum(in_pages(dtype.itemsize * size.numel()) for dtype, size in tensors.values())


def part_of(tensor: Tensor, parameter: Tensor, part: range) -> Tensor:
    """Returns a flat view of what a tensor of the parameter's state has for these elements: numbers, or their scales.

    In a format with scales the range begins with a block of 256.
    """
    flat = tensor.view(-1)
    if len(flat) != parameter.numel():
        return flat[part.start // BLOCK : -(-part.stop // BLOCK)]
    return flat[part.start : part.stop]


def version_and_address(tensor: Tensor) -> tuple[int, int]:
    """Returns what shows that a tensor was written, and that it was given other data."""
    return tensor._version, tensor.data_ptr()


def some_elements(tensor: Tensor, parts: Iterable[range]) -> bytes:
    """Returns elements of a tensor on the host, of each of `parts` of its flat form.

    They show most writes through `.data` or NumPy, which raise no version counter.
    """
    bits = tensor.detach().view(BITS[tensor.element_size()]).numpy().flat
    return b"".join(bits[part.start : part.stop : max(len(part) // MARKED, 1)].tobytes() for part in parts)
