"""Finds host memory in the operations of a forward that runs on a device, also where the device is the CPU.

On a GPU torch refuses an operation of tensors on the host and on the device. On the CPU, which is its own host, the
same mistake of a mode or of a model computes the right numbers. So here the operations of a forward are watched:
memory at home, and what is computed from it alone, is the host's; all else is the device's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

import torch

from offload.torch_private import selective_checkpoints
from offload.torch_private.tensor_parts import any_wraps
from offload.torch_private.torch_internals import StorageWeakRef, TorchDispatchMode, autocast_of_caller, trilinear

# Host memory of weights, and their name. The tensor keeps its addresses from being used for anything else.
Home = tuple[torch.Tensor, str]
# They may copy between host and device.
COPIES = {"aten::copy_", "aten::_to_copy"}


class HostOperandError(RuntimeError):
    """Raised for an operation of host memory and device memory, which a GPU could not run."""


class DeviceWork(TorchDispatchMode):
    """Raises HostOperandError for operations inside the block that take tensors at `homes` and tensors of the device.

    `on_compute` tells whether an operation runs on the device's compute stream; the engine's copies do not.
    """

    def __init__(self, homes: Iterable[Home], on_compute: Callable[[], bool]):
        super().__init__()
        self._homes = sorted(homes, key=lambda home: home[0].data_ptr())
        self._starts = [memory.data_ptr() for memory, _ in self._homes]
        self._on_compute = on_compute
        # Storages that were made inside the block: True for those of the host, False for those of either side.
        self._made: dict[int, tuple[StorageWeakRef, bool]] = {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        if types and any_wraps(types):
            # Its own operations come here one by one. A selective checkpoint outside of this mode has to see the whole.
            return function(*arguments, **keywords) if selective_checkpoints.here.depth else NotImplemented
        if not self._on_compute():
            return function(*arguments, **keywords)
        operands = [tensor for tensor in _tensors((*arguments, *keywords.values())) if tensor.dim()]
        sides = {self._is_host(tensor) for tensor in operands}
        if True in sides and False in sides and function.name().partition(".")[0] not in COPIES:
            home = next(filter(None, map(self._home, operands)), "memory computed from it")
            raise HostOperandError(
                f"{home}: {function} takes it in host memory together with tensors of the device, inside a forward."
                " Read a weight as an attribute of its module while the model's forward runs, or leave its module out"
                " of the mode with `exclude`"
            )
        if function.namespace == "aten" and function is not trilinear:
            result = function(*arguments, **keywords)
        else:
            with autocast_of_caller():
                result = function(*arguments, **keywords)
        # A copy to a device that is named, as by `tensor.to(device, copy=True)`, is there.
        is_sent = function.name() in COPIES and keywords.get("device") is not None
        if False not in sides and not is_sent:
            for tensor in _tensors(result if isinstance(result, (tuple, list)) else (result,)):
                self._note(tensor, is_host=True in sides)
        return result

    def _is_host(self, tensor: torch.Tensor) -> bool | None:
        """True for host memory, False for the device's, None for what may be on either side."""
        if self._home(tensor) is not None:
            return True
        reference, is_host = self._made.get(tensor.data_ptr(), (None, False))
        if reference is None or reference.expired():
            return False
        return is_host or None

    def _home(self, tensor: torch.Tensor) -> str | None:
        address = tensor.data_ptr()
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._starts[index] + self._homes[index][0].nbytes:
            return None
        return self._homes[index][1]

    def _note(self, tensor: torch.Tensor, is_host: bool) -> None:
        if tensor.numel():
            self._made[tensor.data_ptr()] = StorageWeakRef(tensor.untyped_storage()), is_host


def _tensors(values: Iterable[object]) -> Iterable[torch.Tensor]:
    """Yields the tensors that have memory, also those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and value.device.type == "cpu":
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
