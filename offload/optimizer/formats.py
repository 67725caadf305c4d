"""The formats in which AdamW holds its states: names, tensors and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.knobs import one_of
from offload.optimizer.rounding import BLOCK, scales_for

# The tensor beside a bfloat16 weight that makes its master, by `master`.
MASTER_DTYPES = {"compact": torch.int16, "stochastic": None}
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
MOMENTS = ("exp_avg", "exp_avg_sq")
# The name of a state's master tensor, by its dtype.
MASTER_NAMES = {torch.float32: "master", torch.int16: "remainder"}
# torch's AdamW would take codes under the name of a moment for its values.
CODES, SCALE = "{}_codes", "{}_scale"


@dataclass(frozen=True)
class StateFormat:
    """The formats of masters and moments; see `HostAdamW` for the knobs. Raises KnobError for an unknown name."""

    master: str = "compact"
    state_dtype: str = "fp32"

    def __post_init__(self) -> None:
        one_of("master", self.master, *MASTER_DTYPES)
        one_of("state_dtype", self.state_dtype, *STATE_DTYPES)

    @property
    def moment_dtype(self) -> torch.dtype:
        return STATE_DTYPES[self.state_dtype]

    @property
    def moment_names(self) -> tuple[str, str]:
        """The names of the two moments' tensors in a state."""
        first, second = (CODES.format(name) for name in MOMENTS) if self.state_dtype == "int8" else MOMENTS
        return first, second

    def master_dtype(self, weight: torch.dtype) -> torch.dtype | None:
        """Returns the dtype of the master tensor beside weights of dtype `weight`; None if there is none."""
        if weight == torch.float32:
            return None
        # The bits of a float16 number are not the first of a float32 one.
        return MASTER_DTYPES[self.master] if weight == torch.bfloat16 else torch.float32

    def tensors(self, weight: torch.dtype, shape: torch.Size) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Returns dtype and shape of each tensor in the state of a parameter, by name; a copy of it is not counted."""
        found = {"step": (torch.float32, torch.Size())}
        for moment, name in zip(MOMENTS, self.moment_names, strict=True):
            found[name] = (self.moment_dtype, shape)
            if name != moment:
                found[SCALE.format(moment)] = (torch.float32, torch.Size([scales_for(shape.numel())]))
        if (master := self.master_dtype(weight)) is not None:
            found[MASTER_NAMES[master]] = (master, shape)
        return found

    def nbytes(self, weight: torch.dtype, shape: torch.Size) -> int:
        """Returns the bytes of these tensors."""
        return sum(dtype.itemsize * size.numel() for dtype, size in self.tensors(weight, shape).values())

    @property
    def update_bytes(self) -> float:
        """Bytes of memory traffic that an update of a bfloat16 weight with a bfloat16 gradient takes."""
        states = self.nbytes(torch.bfloat16, torch.Size([BLOCK])) - torch.float32.itemsize
        # All are read and written, but the gradient.
        return 2 + 2 * (2 + states / BLOCK)


def needs_copy(parameter: Tensor, format: StateFormat, placed: bool) -> bool:
    """Tells whether a state has a copy of the weight: one that kernels can read, which walk memory on one device.

    Beside a float32 master a weight is not read.
    """
    return (placed or not parameter.is_contiguous()) and format.master_dtype(parameter.dtype) != torch.float32


def state_bytes(parameters: Iterable[Tensor], format: StateFormat = StateFormat(), placed: bool = False) -> int:
    """Returns the bytes of states beside those of `parameters`, each counted once, that train; meta ones will do.

    `placed`: on a device, as `States.place` puts them there.
    """
    total = 0
    for parameter in dict.fromkeys(parameters):
        if parameter.requires_grad:
            total += format.nbytes(parameter.dtype, parameter.shape)
            total += parameter.nbytes if needs_copy(parameter, format, placed) else 0
    return total
