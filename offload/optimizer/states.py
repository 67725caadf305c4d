"""The states of AdamW parameter by parameter: their bytes, the device they live on, and how they are made there.

The state of a parameter is a dict: `step` (float32 scalar), `exp_avg` and `exp_avg_sq` (the parameter's shape,
contiguous), or their `_codes` (uint8) and `_scale` (float32, one for each block of 256); and, by the format, what makes
the master of the weight: `master`, `remainder` or `compensation`, of the parameter's shape. `weight` is a copy of the
parameter, where the parameter itself is on another device than its state, or not contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from offload.byte_sizes import GIB
from offload.memory.limits import free_host_bytes
from offload.optimizer.formats import MASTER_NAMES, StateFormat
from offload.torch_private.torch_internals import add_to_each

WEIGHT = "weight"
# Elements of a range that `some_elements` has at least, if there are so many.
MARKED = 16
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

State = dict[str, Tensor]


def state_bytes(parameters: Iterable[Tensor], format: StateFormat = StateFormat(), placed: bool = False) -> int:  # noqa: B008
    """Returns the bytes of states beside those of `parameters`, each counted once, that train; meta ones will do.

    `placed`: as `StatePlacement.place` puts them on a device.
    """
    total = 0
    for parameter in dict.fromkeys(parameters):
        if parameter.requires_grad:
            total += format.nbytes(parameter.dtype, parameter.shape)
            total += parameter.nbytes if needs_copy(parameter, format, placed) else 0
    return total


def require_host_memory(parameters: Iterable[Tensor], format: StateFormat) -> None:
    """Raises MemoryError with both sizes if the host has no room for the states beside these `parameters`."""
    needed, free = state_bytes(parameters, format), free_host_bytes()
    if free is not None and needed > free:
        raise MemoryError(
            f"{needed / GIB:.2f} GiB of host memory are needed for the optimizer's states,"
            f" {free / GIB:.2f} GiB are free"
        )


def needs_copy(parameter: Tensor, format: StateFormat, placed: bool) -> bool:
    """Tells whether a state has a copy of the weight: one that kernels can read, which walk memory on one device.

    Beside a float32 master a weight is not read.
    """
    return (placed or not parameter.is_contiguous()) and format.master_dtype(parameter.dtype) != torch.float32


class StatePlacement:
    """Makes and moves the states of parameters: beside the parameter, or on the device where `place` puts them.

    A parameter that was written since its last update counts as it is then, its copy is made anew. But a weight with a
    float32 master is overwritten by that. `placed` has the devices of the states that `place` has moved.
    """

    def __init__(self, format: StateFormat):
        self._format = format
        self.placed: dict[Tensor, torch.device] = {}
        # The names of the tensors in the state of a parameter, by its dtype.
        self._names: dict[torch.dtype, frozenset[str]] = {}
        # The versions of parameters at which their copies were last equal to them.
        self._versions: dict[Tensor, tuple[int, int]] = {}

    def place(self, parameter: Tensor, state: State, device: torch.device) -> None:
        """Moves the parameter's state to `device`, and keeps it there from now on."""
        self.placed[parameter] = device
        state |= {name: tensor.to(device) for name, tensor in state.items()}

    def is_placed(self, parameter: Tensor) -> bool:
        return parameter in self.placed

    def device_of(self, parameter: Tensor) -> torch.device:
        """Returns the device of the parameter's state."""
        return self.placed.get(parameter, parameter.device)

    def prepare(self, parameter: Tensor, state: State) -> None:
        """Makes the missing tensors of the parameter's state, and a copy of the weight that is outdated."""
        names = self._names.get(parameter.dtype)
        if names is None or not names <= state.keys():
            self._complete(parameter, state)
        if needs_copy(parameter, self._format, parameter in self.placed):
            if WEIGHT not in state:
                state[WEIGHT] = self._memory(parameter, parameter.shape, parameter.dtype)
                self._versions.pop(parameter, None)
            # A copy beside the parameter is made anew each time: writes through `.data` or NumPy raise no version.
            is_beside = parameter not in self.placed
            if is_beside or self._versions.get(parameter) != version_and_address(parameter):
                state[WEIGHT].copy_(parameter.detach())
                self.note_update(parameter)

    def _complete(self, parameter: Tensor, state: State) -> None:
        tensors = self._format.tensors(parameter.dtype, parameter.shape)
        self._names[parameter.dtype] = frozenset(tensors)
        for name, (dtype, shape) in tensors.items():
            if name not in state:
                # Written, not merely promised as by torch.zeros, so that memory that is missing is missed now.
                memory = self._memory(parameter, shape, dtype).zero_()
                if name == MASTER_NAMES[torch.float32]:
                    memory.copy_(parameter.detach())
                # Last, so that an interrupt leaves no master of zeros.
                state[name] = memory

    def count_updates(self, parameters: list[Tensor], states: list[State]) -> None:
        """Counts updates that are about to be made, of parameters of one device with these states, in few calls."""
        add_to_each([state["step"] for state in states], 1)
        # The kernels that write the weight themselves do not raise its version.
        torch.autograd.graph.increment_version(parameters)
        for parameter, state in zip(parameters, states, strict=True):
            if WEIGHT in state:
                self.note_update(parameter)

    def note_update(self, parameter: Tensor) -> None:
        """Notes that the copy of the parameter is equal to it as from the present version on."""
        self._versions[parameter] = version_and_address(parameter)

    def adopt(self, parameter: Tensor, loaded: State) -> State:
        """Returns a loaded state of this format on the device of the parameter's state."""
        device = self.device_of(parameter)
        return {name: tensor.to(device).contiguous() for name, tensor in loaded.items()}

    def _memory(self, parameter: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device_of(parameter))


def version_and_address(tensor: Tensor) -> tuple[int, int]:
    """Returns what shows that a tensor was written, and that it was given other data."""
    return tensor._version, tensor.data_ptr()


def some_elements(tensor: Tensor, parts: Iterable[range]) -> bytes:
    """Returns elements of a tensor on the host, of each of `parts` of its flat form.

    They show most writes through `.data` or NumPy, which raise no version counter.
    """
    bits = tensor.detach().view(BITS[tensor.element_size()]).numpy().flat
    return b"".join(bits[part.start : part.stop : max(len(part) // MARKED, 1)].tobytes() for part in parts)
