"""The error for a knob whose value does not fit, and a message that several modes have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

OUTSIDE_STEP = (
    "forward with gradients outside a step: wrap forward and backward in `with attached.step():`,"
    " or evaluation in torch.no_grad()"
)


def refuse_part(name: str, tensor: Tensor) -> None:
    """Raises ValueError in one line for a DTensor, of which this process may have a part, as FSDP2 makes them."""
    # Whoever has made one has imported it.
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        raise ValueError(
            f"{name} is a DTensor, of which this process may have a part: a mode moves whole tensors: leave out"
            " fully_shard, parallelize_module and distribute_tensor"
        )


class KnobError(ValueError):
    """A knob has a value that it cannot have: the message is `KNOB=VALUE: PROBLEM`.

    The engine names the knob alone (`slots=0: must be at least 1`). Whoever passes the knob on knows where it stands
    in the configuration and puts the path before it (`under`).
    """

    def __init__(self, knob: str, value: object, problem: str):
        # The arguments as they are, so that the error can be pickled, as between processes.
        super().__init__(knob, value, problem)
        self.knob, self.value, self.problem = knob, value, problem

    def __str__(self) -> str:
        value = str(self.value)
        # A text may hold line breaks, and the message is one line.
        return f"{self.knob}={value if value.isprintable() else repr(value)}: {self.problem}"

    def under(self, path: str) -> KnobError:
        """Returns the same error with `path.` before the name of the knob."""
        return KnobError(f"{path}.{self.knob}", self.value, self.problem)


@contextmanager
def knobs_under(path: str) -> Iterator[None]:
    """Raises each KnobError of the block again with `path.` before the name of its knob."""
    try:
        yield
    except KnobError as error:
        raise error.under(path) from error.__cause__
