"""The states of AdamW parameter by parameter: their bytes, the device they live on, and how they are made there.

The state of a parameter is a dict: `step` (float32 scalar), `exp_avg` and `exp_avg_sq` (the parameter's shape,
contiguous) and, unless the parameter is its own, `master` (float32, likewise).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP_BYTES = 4
MASTER_BYTES = 4

State = dict[str, Tensor]


def is_own_master(parameter: Tensor) -> bool:
    """Tells whether a parameter is updated in place, without a float32 copy."""
    # Kernels walk memory: on tensors of unlike strides they would pair up elements that do not belong together.
    return parameter.dtype == torch.float32 and parameter.is_contiguous()


def state_bytes(parameters: Iterable[Tensor], moment_dtype: torch.dtype) -> int:
    """Returns the bytes of states beside those of `parameters`, each counted once, that train; meta ones will do."""
    total = 0
    for parameter in dict.fromkeys(parameters):
        if parameter.requires_grad:
            master = 0 if is_own_master(parameter) else MASTER_BYTES
            total += STEP_BYTES + parameter.numel() * (master + 2 * moment_dtype.itemsize)
    return total


def placed_bytes(parameters: Iterable[Tensor], moment_dtype: torch.dtype) -> int:
    """Returns the bytes of the states of `parameters` that `StatePlacement.place` would put on a device."""
    per_element = MASTER_BYTES + 2 * moment_dtype.itemsize
    return sum(STEP_BYTES + parameter.numel() * per_element for parameter in set(parameters))


class StatePlacement:
    """Makes and moves the states of parameters: beside the parameter, or on the device where `place` puts them.

    A float32 parameter that was written since its last update is the truth: its master is made anew. A parameter of
    lower precision is overwritten by its master.
    """

    def __init__(self, moment_dtype: torch.dtype):
        self._moment_dtype = moment_dtype
        self._placed: dict[Tensor, torch.device] = {}
        # Autograd's version counter of parameters when their masters were last equal to them.
        self._versions: dict[Tensor, int] = {}

    def place(self, parameter: Tensor, state: State, device: torch.device) -> None:
        """Moves the parameter's state, with a master, to `device`, and keeps it there from now on."""
        self._placed[parameter] = device
        state |= {name: tensor.to(device) for name, tensor in state.items()}

    def is_placed(self, parameter: Tensor) -> bool:
        return parameter in self._placed

    def device_of(self, parameter: Tensor) -> torch.device:
        """Returns the device of the parameter's state."""
        return self._placed.get(parameter, parameter.device)

    def prepare(self, parameter: Tensor, state: State) -> None:
        """Makes the missing tensors of the parameter's state, and a master that is outdated."""
        if not state:
            state["step"] = torch.zeros((), device=self.device_of(parameter))
            for name in MOMENTS:
                # Written, not merely promised as by torch.zeros, so that memory that is missing is missed now.
                state[name] = self._memory(parameter, self._moment_dtype).zero_()
        if (parameter in self._placed or not is_own_master(parameter)) and self._needs_master(parameter, state):
            master = state["master"] if "master" in state else self._memory(parameter, torch.float32)
            state["master"] = master.copy_(parameter.detach())
            self._versions[parameter] = parameter._version

    def note_update(self, parameter: Tensor) -> None:
        """Notes that the parameter's master is equal to it as from the present version on."""
        self._versions[parameter] = parameter._version

    def adopt(self, parameter: Tensor, loaded: State) -> State:
        """Returns a loaded state in the dtypes and on the device of the parameter's state."""
        device = self.device_of(parameter)
        dtypes = dict.fromkeys(MOMENTS, self._moment_dtype)
        return {
            name: tensor.to(device, dtypes.get(name, torch.float32)).contiguous() for name, tensor in loaded.items()
        }

    def _needs_master(self, parameter: Tensor, state: State) -> bool:
        written = parameter.dtype == torch.float32 and self._versions.get(parameter) != parameter._version
        return written or "master" not in state

    def _memory(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(parameter.shape, dtype=dtype, device=self.device_of(parameter))
