"""The states of AdamW parameter by parameter: the device they live on, and how they are made and updated there.

The state of a parameter is a dict: `step` (float32 scalar), `exp_avg` and `exp_avg_sq` (the parameter's shape,
contiguous), or their `_codes` (uint8) and `_scale` (float32, one for each block of 256); and, by the format, what makes
the master of the weight: `master` or `remainder`, of the parameter's shape. `weight` is a copy of the parameter, where
the parameter itself is on another device than its state, or not contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from offload.knobs import GIB
from offload.memory.host_memory import HUGE_PAGE_BYTES, HostBlock, populate
from offload.memory.limits import free_host_bytes
from offload.optimizer.claims import WEIGHT, Claim, State, update_elsewhere, update_in_place
from offload.optimizer.formats import MASTER_NAMES, StateFormat, needs_copy, state_bytes
from offload.optimizer.kernels import UpdateKernel
from offload.optimizer.shared_states import SharedStates
from offload.sharing.shared_memory import PagesAhead
from offload.sharing.sharers import Sharers
from offload.torch_private.torch_internals import add_to_each

# Elements of a range that `some_elements` has at least, if there are so many.
MARKED = 16
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class States:
    """The states of an optimizer's parameters, `tensors`: this process's own, or `SharedStates`.

    States are beside their parameters, or on the device where `place` puts them.
    """

    def __init__(self, format: StateFormat, tensors: MutableMapping[Tensor, State]):
        self.tensors = tensors
        self._format = format
        self._own = OwnStates(format)
        self._shared: SharedStates | None = None

    def share(
        self, slices: Mapping[Tensor, Sequence[range]], sharers: Sharers, ahead: PagesAhead | None = None
    ) -> None:
        """Makes this process one of several that update the parameters of `slices`, each in its own ranges of elements.

        The parameters, contiguous and on the host, are the sharers' shared memory, and so are their states from now on.
        `allocate` makes these, of the pages of `ahead`; each sharer calls it, and waits for the others. Raises
        RuntimeError where states exist, or have a place on the device, and ValueError for moments in 8 bits where a
        range does not begin with a block.
        """
        if self.tensors or any(map(self._own.is_placed, slices)):
            raise RuntimeError("states that exist cannot be shared: share the parameters before anything has states")
        self._shared = SharedStates(slices, self._format, sharers, ahead)

    def allocate(self, parameters: Iterable[Tensor]) -> None:
        """Makes the states of those `parameters` that train and have none; see `HostAdamW.allocate`."""
        if self._shared is not None:
            self._shared.allocate()
        missing = [p for p in parameters if p.requires_grad and not self.tensors.get(p)]
        on_host = [p for p in missing if p.device.type == "cpu" and self._of(p) is self._own and not self.is_placed(p)]
        needed, free = state_bytes(on_host, self._format), free_host_bytes()
        if free is not None and needed > free:
            raise MemoryError(
                f"{needed / GIB:.2f} GiB of host memory are needed for the optimizer's states,"
                f" {free / GIB:.2f} GiB are free"
            )
        for parameter in missing:
            self._of(parameter).prepare(parameter, self.tensors[parameter])
        if self._shared is not None:
            self._shared.settle()

    def begin(self, parameters: list[Tensor]) -> list[State]:
        """Counts updates that are about to be made, of parameters of one device; returns the parameters' states."""
        states = [self.tensors[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            self._of(parameter).prepare(parameter, state)
        add_to_each([state["step"] for state in states], 1)
        # The kernels that write the weight themselves do not raise its version.
        torch.autograd.graph.increment_version(parameters)
        for parameter, state in zip(parameters, states, strict=True):
            if WEIGHT in state:
                self._own.note_update(parameter)
        return states

    def update(self, claim: Claim, kernel_on: Callable[[torch.device], UpdateKernel], scale: float) -> None:
        """Makes a claimed update where the state is; the gradient counts `scale` times."""
        parameter = claim.parameter
        of = self._of(parameter)
        if not of.is_placed(parameter):
            (state,) = self.begin([parameter])
            update_in_place(claim, state, kernel_on(parameter.device), scale, of.parts(parameter))
            return
        # The copy there is made anew: see `some_elements`.
        torch.autograd.graph.increment_version(parameter)
        gradient = of.own_part(parameter, claim.gradient).to(of.device_of(parameter))
        for home, weight in self.update_placed(claim, gradient, kernel_on, scale):
            home.copy_(weight)

    @torch.no_grad()
    def update_placed(
        self, claim: Claim, gradient: Tensor, kernel_on: Callable[[torch.device], UpdateKernel], scale: float = 1.0
    ) -> list[tuple[Tensor, Tensor]]:
        """Updates the placed state of a claimed parameter with `gradient` on its device, on the current stream.

        Where the parameter is shared, `gradient` has this process's slices, one behind the other (1-D). Returns pairs
        of a place at home and the new weight for it on the device, alike in shape and dtype.
        """
        of = self._of(claim.parameter)
        (state,) = self.begin([claim.parameter])
        return of.update_placed(claim, state, gradient, kernel_on(of.device_of(claim.parameter)), scale)

    def bytes_to_place(self, parameters: Iterable[Tensor]) -> int:
        """Returns the bytes of the states that `place` puts on the device for these parameters, masters included."""
        return sum(self._of(parameter).bytes_to_place(parameter) for parameter in dict.fromkeys(parameters))

    def place(self, parameters: Iterable[Tensor], device: torch.device) -> None:
        """Puts the states of these parameters, masters too, on `device`, wherever the parameters live.

        States that exist move. They are updated by `update_placed`, for a caller who has the gradients there.
        """
        for parameter in parameters:
            self._of(parameter).place(parameter, self.tensors.get(parameter, {}), device)

    def is_placed(self, parameter: Tensor) -> bool:
        """True if what this process has of a parameter's state was placed on a device, and is updated there."""
        return self._of(parameter).is_placed(parameter)

    def parts(self, parameter: Tensor) -> Sequence[range]:
        """Returns the ranges of elements of a parameter's flat form that this process updates: all, or its slices."""
        return self._of(parameter).parts(parameter)

    def bring_home(self) -> None:
        """Copies shared states that were updated on this process's device to the memory that all sharers read."""
        if self._shared is not None:
            self._shared.bring_home()

    def adopt(self, loaded: Mapping[Tensor, State]) -> None:
        """Takes loaded states, of this format, in the place of all that there are."""
        self.tensors.clear()
        for parameter, state in loaded.items():
            self.tensors[parameter] = self._of(parameter).adopt(parameter, state)

    def _of(self, parameter: Tensor) -> OwnStates | SharedStates:
        return self._shared if self._shared is not None and parameter in self._shared else self._own


class OwnStates:
    """Makes and moves the states that this process alone has.

    A parameter that was written since its last update counts as it is then, its copy is made anew. But a weight with a
    float32 master is overwritten by that.
    """

    def __init__(self, format: StateFormat):
        self._format = format
        self._placed: dict[Tensor, torch.device] = {}
        # The names of the tensors in the state of a parameter, by its dtype.
        self._names: dict[torch.dtype, frozenset[str]] = {}
        # The versions of parameters at which their copies were last equal to them.
        self._versions: dict[Tensor, tuple[int, int]] = {}

    def parts(self, parameter: Tensor) -> Sequence[range]:
        return (range(parameter.numel()),)

    def own_part(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient

    def bytes_to_place(self, parameter: Tensor) -> int:
        return state_bytes([parameter], self._format, placed=True)

    def place(self, parameter: Tensor, state: State, device: torch.device) -> None:
        self._placed[parameter] = device
        state |= {name: tensor.to(device) for name, tensor in state.items()}

    def is_placed(self, parameter: Tensor) -> bool:
        return parameter in self._placed

    def device_of(self, parameter: Tensor) -> torch.device:
        """Returns the device of the parameter's state."""
        return self._placed.get(parameter, parameter.device)

    def update_placed(
        self, claim: Claim, state: State, gradient: Tensor, kernel: UpdateKernel, scale: float
    ) -> list[tuple[Tensor, Tensor]]:
        return [(claim.parameter.data, update_elsewhere(claim, state, gradient, kernel, scale))]

    def prepare(self, parameter: Tensor, state: State) -> None:
        """Makes the missing tensors of the parameter's state, and a copy of the weight that is outdated."""
        names = self._names.get(parameter.dtype)
        if names is None or not names <= state.keys():
            self._complete(parameter, state)
        is_placed = self.is_placed(parameter)
        if not needs_copy(parameter, self._format, is_placed):
            return
        if WEIGHT not in state:
            state[WEIGHT] = self._zeros(parameter, parameter.shape, parameter.dtype)
            self._versions.pop(parameter, None)
        # A copy beside the parameter is made anew each time: writes through `.data` or NumPy raise no version.
        if not is_placed or self._versions.get(parameter) != version_and_address(parameter):
            state[WEIGHT].copy_(parameter.detach())
            self.note_update(parameter)

    def note_update(self, parameter: Tensor) -> None:
        """Notes that the copy of the parameter is equal to it as from the present version on."""
        self._versions[parameter] = version_and_address(parameter)

    def adopt(self, parameter: Tensor, loaded: State) -> State:
        """Returns a loaded state of this format on the device of the parameter's state."""
        device = self.device_of(parameter)
        return {name: tensor.to(device).contiguous() for name, tensor in loaded.items()}

    def _complete(self, parameter: Tensor, state: State) -> None:
        tensors = self._format.tensors(parameter.dtype, parameter.shape)
        self._names[parameter.dtype] = frozenset(tensors)
        for name, (dtype, shape) in tensors.items():
            if name not in state:
                memory = self._zeros(parameter, shape, dtype)
                if name == MASTER_NAMES[torch.float32]:
                    memory.copy_(parameter.detach())
                # Last, so that an interrupt leaves no master of zeros.
                state[name] = memory

    def _zeros(self, parameter: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns zeros whose memory is there, and not merely promised: what is missing is missed now."""
        device, nbytes = self.device_of(parameter), dtype.itemsize * shape.numel()
        if device.type == "cpu" and nbytes >= HUGE_PAGE_BYTES:
            block = HostBlock(nbytes, "states")
            # Pages that the system makes are zeros: to write them takes longer than to make them.
            if populate(block.bytes.data_ptr(), nbytes):
                return block.bytes.view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device).zero_()


def version_and_address(tensor: Tensor) -> tuple[int, int]:
    """Returns what shows that a tensor was written, and that it was given other data."""
    return tensor._version, tensor.data_ptr()


def some_elements(tensor: Tensor, parts: Iterable[range]) -> bytes:
    """Returns elements of a tensor on the host, of each of `parts` of its flat form.

    They show most writes through `.data` or NumPy, which raise no version counter.
    """
    bits = tensor.detach().view(BITS[tensor.element_size()]).numpy().flat
    return b"".join(bits[part.start : part.stop : max(len(part) // MARKED, 1)].tobytes() for part in parts)
